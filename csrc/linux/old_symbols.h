// Included before every file on Linux: asks for the versions of glibc's functions that glibc 2.28
// has, so that a library built on a newer system loads there, too. The newer versions differ in
// errno alone.
#pragma once
#include <features.h>

#if defined(__GLIBC__) && defined(__x86_64__)
#define BOLTZATTN_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__GLIBC__) && defined(__aarch64__)
#define BOLTZATTN_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif

#ifdef BOLTZATTN_OLD
BOLTZATTN_OLD(exp);
BOLTZATTN_OLD(exp2);
BOLTZATTN_OLD(log);
BOLTZATTN_OLD(pow);
#endif
