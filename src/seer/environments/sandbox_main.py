# SPDX-License-Identifier: Apache-2.0
"""The inside of the sandbox: a program of its own, which limits itself and then runs the code on its standard input.

It imports nothing of Seer. A seccomp filter (Linux on x86-64) makes the kernel refuse to open sockets, to run programs,
to write, create, rename or remove files, and to signal others; what is left is to compute and to read. Code that makes
another process is ended by SIGSYS, which it cannot catch and which nothing else gives it, so the caller knows why it
died. Time, memory and output are limited from outside and by resource limits.

    python -I -S sandbox_main.py MEMORY_BYTES CPU_S < code

Invariant: no code of the caller runs before the limits and the filter are in place; without them the program ends with
status 3.
"""

import ctypes
import resource
import struct
import sys

ARCHITECTURE = 0xC000003E  # x86-64
NOT_PERMITTED, NO_SUCH_CALL = 1, 38  # EPERM, ENOSYS
FORKING = (57, 58)  # fork, vfork
CLONE, CLONE_THREAD, OPEN, OPENAT, CLONE3, OPENAT2 = 56, 0x00010000, 2, 257, 435, 437
WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE without its directory bit
REFUSED = (
    *(41, 42, 49, 50, 53),  # socket, connect, bind, listen, socketpair
    *(59, 322),  # execve, execveat
    *(62, 129, 200, 234, 297, 424),  # kill, rt_sigqueueinfo, tkill, tgkill, rt_tgsigqueueinfo, pidfd_send_signal
    *(76, 82, 83, 84, 85, 86, 87, 88),  # truncate, rename, mkdir, rmdir, creat, link, unlink, symlink
    *(90, 91, 92, 93, 94, 132, 133, 235),  # chmod, fchmod, chown, fchown, lchown, utime, mknod, utimes
    *(258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 316, 452),  # the same, relative to a folder
    *(101, 310, 311, 434, 438),  # ptrace, process_vm_readv, process_vm_writev, pidfd_open, pidfd_getfd
    *(155, 161, 165, 166, 167, 169, 175, 246, 248, 272, 298, 308, 313, 321, 425),  # roots, mounts, modules, keys, bpf
    *(302, 188, 189, 190, 197, 198, 199),  # prlimit64, extended attributes
    *(29, 64, 68, 240, 241),  # shmget, semget, msgget, mq_open, mq_unlink: what they make outlives the process
    *(141, 142, 144, 203, 251, 314, 256, 279, 440),  # priorities, cores and memory of other processes
    *(304, 428, 429, 430, 431, 432, 433, 442),  # open_by_handle_at, and newer ways to mount
    *(159, 163, 164, 168, 170, 171, 172, 173, 179, 227, 305, 320, 323),  # what root may do to the machine
)


def rule(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction of the filter."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def load(offset: int) -> bytes:
    """Load a word of the system call's description."""
    return rule(0x20, offset)


def answer(error: int) -> bytes:
    """Let the call fail with this error; 0 lets it pass."""
    return rule(0x06, 0x00050000 | error if error else 0x7FFF0000)


def end_process() -> bytes:
    """End the whole process with SIGSYS."""
    return rule(0x06, 0x80000000)


def refuse_if_set(number: int, argument: int, bits: int) -> list[bytes]:
    """Refuse a call whose argument has one of these bits."""
    return [
        rule(0x15, number, 0, 4),
        load(16 + 8 * argument),
        rule(0x45, bits, 0, 1),
        answer(NOT_PERMITTED),
        answer(0),
    ]


def instructions() -> list[bytes]:
    """The whole filter."""
    lines = [load(4), rule(0x15, ARCHITECTURE, 1, 0), answer(NOT_PERMITTED), load(0)]
    lines += [rule(0x35, 0x40000000, 0, 1), answer(NOT_PERMITTED)]  # calls of the x32 interface
    for number in FORKING:
        lines += [rule(0x15, number, 0, 1), end_process()]
    for number in REFUSED:
        lines += [rule(0x15, number, 0, 1), answer(NOT_PERMITTED)]
    for number in (CLONE3, OPENAT2):  # their flags are out of reach: programs then use the older calls
        lines += [rule(0x15, number, 0, 1), answer(NO_SUCH_CALL)]
    lines += [rule(0x15, CLONE, 0, 4), load(16), rule(0x45, CLONE_THREAD, 1, 0), end_process(), answer(0)]
    lines += [*refuse_if_set(OPEN, 1, WRITING), *refuse_if_set(OPENAT, 2, WRITING), answer(0)]
    return lines


def confine() -> None:
    """Put the filter in place, for good."""
    code = b"".join(instructions())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(program, len(program))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, ctypes.c_void_p(ctypes.addressof(holder)), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl refused")


def limit(memory_bytes: int, cpu_s: int) -> None:
    """Limit this process; hard limits, which it cannot raise."""
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    source = sys.stdin.buffer.read()
    try:
        limit(int(sys.argv[1]), int(sys.argv[2]))
        confine()
    except Exception as error:
        print(f"the sandbox cannot be made: {error}", file=sys.stderr)
        sys.exit(3)
    exec(compile(source, "<tool>", "exec"), {"__name__": "__main__"})
