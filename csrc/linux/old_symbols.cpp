// What compilers newer than manylinux_2_28's expect from libstdc++.so and an older one lacks.
#include <new>
#include <sstream>

#if defined(__linux__) && defined(__GLIBCXX__)
template std::basic_stringstream<char>::basic_stringstream();    // GLIBCXX_3.4.26
template std::basic_ostringstream<char>::basic_ostringstream();  // GLIBCXX_3.4.26

namespace std {
[[noreturn]] void __throw_bad_array_new_length() {  // GLIBCXX_3.4.29
  throw bad_array_new_length();
}
}  // namespace std
#endif
