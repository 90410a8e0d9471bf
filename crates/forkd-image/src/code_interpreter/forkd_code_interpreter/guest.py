"""What the guest is: its environment, and whether it was forked."""

import os
import pwd
import re

BOOT_ID = "/proc/sys/kernel/random/boot_id"
# The variables of the sandbox, each ended by a NUL. A hook writes them when a guest is
# forked, and the program that starts the server when a guest boots.
VARIABLES = "/run/forkd-code-interpreter/variables"
MAX_VARIABLES = 1 << 20
# What the hook's process has of its own.
HOOKS_OWN = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "TERM", "LANG", "LC_ALL", "_"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def boot_id():
    """Differs in every forked guest, and stays the same while a guest is paused and resumed."""
    try:
        with open(BOOT_ID) as file:
            return file.read().strip()
    except OSError:
        return ""


def variables():
    """The variables that the sandbox was created with."""
    try:
        with open(VARIABLES, "rb") as file:
            text = file.read(MAX_VARIABLES).decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, _, value in pairs if NAME.fullmatch(name) and name not in HOOKS_OWN}


def environment():
    """The environment of a new kernel."""
    user = pwd.getpwuid(os.getuid())
    return {
        "PATH": f"{user.pw_dir}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": user.pw_dir,
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "SHELL": user.pw_shell or "/bin/sh",
        "LANG": "C.UTF-8",
        "E2B_SANDBOX": "true",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        **variables(),
    }
