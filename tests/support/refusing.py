"""Runs a command on a kernel that refuses system calls: ``refusing.py ERROR COMMAND``.

A seccomp filter refuses memfd_create, pidfd_open and pidfd_send_signal with the named
error, in this process and all that it starts. That is what an old kernel (ENOSYS) and
the filter of a strict container (EPERM) do, whatever way the calls are made.

Source:
    seccomp(2), bpf(4); linux/audit.h; asm/unistd_64.h and asm-generic/unistd.h.
"""

import ctypes
import errno
import os
import sys
from typing import Final

_NUMBERS: Final = {"x86_64": (319, 424, 434), "aarch64": (279, 424, 434)}
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("operand", ctypes.c_uint),
    )


class _Filter(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_ushort),
        ("instructions", ctypes.POINTER(_Instruction)),
    )


def refuse(code: int) -> None:
    """Let the kernel refuse the calls with ``code``, from now on and for ever."""
    instructions = [_Instruction(_LOAD_WORD, 0, 0, 0)]  # The number of the call.
    for number in _NUMBERS[os.uname().machine]:
        instructions.append(_Instruction(_JUMP_IF_EQUAL, 0, 1, number))
        instructions.append(_Instruction(_RETURN, 0, 0, _ERRNO | code))
    instructions.append(_Instruction(_RETURN, 0, 0, _ALLOW))
    array = (_Instruction * len(instructions))(*instructions)
    program = _Filter(len(instructions), array)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(*arguments):
            problem = os.strerror(ctypes.get_errno())
            raise OSError(f"prctl{arguments} installs no filter here: {problem}")


if __name__ == "__main__":
    refuse(getattr(errno, sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
