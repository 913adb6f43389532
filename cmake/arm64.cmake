# Cross build for arm64 (what a Spark is) with the distribution's compiler; programs run under qemu-user.
#   apt: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
# Libraries that are not the compiler's come from build/arm64-sysroot, which scripts/arm64_sysroot.sh fills.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;/usr/aarch64-linux-gnu)
set(sysroot ${CMAKE_CURRENT_LIST_DIR}/../build/arm64-sysroot)
get_filename_component(sysroot ${sysroot} ABSOLUTE)
set(CMAKE_FIND_ROOT_PATH ${sysroot} /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
# Debian's headers lie in /usr/include, which pkg-config never names: the compiler is told itself. The libraries are
# given with their full paths, and CMake notes those folders in the programs, so that qemu finds them.
set(CMAKE_C_FLAGS_INIT "-isystem ${sysroot}/usr/include -isystem ${sysroot}/usr/include/aarch64-linux-gnu")
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${sysroot})
set(ENV{PKG_CONFIG_LIBDIR} ${sysroot}/usr/lib/aarch64-linux-gnu/pkgconfig)
