// Takes the place of glibc's header of this name, which libstdc++ includes for shared_ptr. The
// variable exists since glibc 2.32 only; a library that runs on 2.28 may not ask for it. torch has
// threads in any case.
#ifndef _SYS_SINGLE_THREADED_H
#define _SYS_SINGLE_THREADED_H
static constexpr char __libc_single_threaded = 0;
#endif
