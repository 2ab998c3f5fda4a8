# Builds for 64-bit Arm on another processor, and runs what was built by an emulator: Debian's g++-aarch64-linux-gnu and
# qemu-user-static. `make test-aarch64` uses it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
