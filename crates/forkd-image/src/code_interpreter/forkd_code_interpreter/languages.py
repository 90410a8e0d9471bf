"""The languages: how their kernels start, and how their environment changes while they run."""

import importlib.util
import json
import os
import shlex

PYTHON = "/usr/bin/python3"
# Not the languages of this image: those that clients may ask for.
NAMES = ["python", "javascript", "typescript", "bash", "r", "java"]
ALIASES = {"python3": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}


class Language:
    """One language: its kernel's command line and what differs from other kernels."""

    name = ""
    transport = "tcp"
    """`ipc` where the kernel can do it: no other process of the guest can connect then."""
    interrupt = "signal"
    """`message` to ask the kernel; `end` where an interrupt loses the state in any case."""
    variables = {}
    """Variables of its kernels' environment besides those that all have."""

    def command(self, connection):
        """The kernel's command line for the connection file at path `connection`."""
        raise NotImplementedError

    def is_installed(self):
        raise NotImplementedError

    def prepare(self):
        """Code that a new kernel runs before any other; None if there is none."""
        return None

    def forked(self, variables):
        """Code that a kernel runs in a forked guest before any other. `variables` are the sandbox's."""
        return self.export(variables) if variables else None

    def export(self, variables):
        """Code that sets variables of the environment."""
        raise NotImplementedError

    def enter(self, variables):
        """Code that sets variables for one execution."""
        raise NotImplementedError

    def leave(self, variables):
        """Code that sets them back."""
        raise NotImplementedError


class Python(Language):
    name = "python"
    transport = "ipc"

    def command(self, connection):
        return [
            PYTHON, "-m", "ipykernel_launcher", "-f", connection,
            "--ext=forkd_code_interpreter.kernel",
            "--InteractiveShell.colors=NoColor",
            # The history of all kernels would be one SQLite file, with a thread of its own.
            "--HistoryManager.enabled=False",
        ]  # fmt: skip

    def is_installed(self):
        return importlib.util.find_spec("ipykernel") is not None

    def prepare(self):
        return self.call("prepare")

    def forked(self, variables):
        return self.call("forked", variables)

    def export(self, variables):
        return self.call("export", variables)

    def enter(self, variables):
        return self.call("enter", variables)

    def leave(self, variables):
        return self.call("leave")

    @staticmethod
    def call(function, *arguments):
        # No name of the user's changes.
        values = ", ".join(repr(argument) for argument in arguments)
        return f"__import__('sys').modules['forkd_code_interpreter.kernel'].{function}({values})"


class Bash(Language):
    name = "bash"
    transport = "ipc"

    def command(self, connection):
        return [PYTHON, "-m", "bash_kernel", "-f", connection]

    def is_installed(self):
        return importlib.util.find_spec("bash_kernel") is not None

    def export(self, variables):
        return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())

    def enter(self, variables):
        lines = []
        for name, value in variables.items():
            lines.append(f"__forkd_{name}=${{{name}+x}}${{{name}-}}")
            lines.append(f"export {name}={shlex.quote(value)}")
        return "\n".join(lines)

    def leave(self, variables):
        return "\n".join(
            f'if [ -n "$__forkd_{name}" ]; then {name}="${{__forkd_{name}#x}}"; else unset {name}; fi; '
            f"unset __forkd_{name}"
            for name in variables
        )


class JavaScript(Language):
    name = "javascript"
    interrupt = "end"
    kernel = "/usr/local/bin/ijskernel"

    def command(self, connection):
        return ["/usr/bin/node", self.kernel, "--hide-undefined", "--protocol=5.1", connection]

    def is_installed(self):
        return os.path.exists(self.kernel) and os.path.exists("/usr/bin/node")

    def export(self, variables):
        return f"void Object.assign(process.env, {json.dumps(variables)})"

    def enter(self, variables):
        # `before` is kept where user code does not look for it.
        return (
            f"void (() => {{ const now = {json.dumps(variables)}, before = {{}}; "
            "for (const name in now) before[name] = process.env[name]; "
            "globalThis[Symbol.for('forkd.before')] = before; Object.assign(process.env, now); })()"
        )

    def leave(self, variables):
        return (
            "void (() => { const before = globalThis[Symbol.for('forkd.before')] || {}; "
            "for (const name in before) if (before[name] === undefined) delete process.env[name]; "
            "else process.env[name] = before[name]; })()"
        )


class TypeScript(Language):
    name = "typescript"
    interrupt = "message"
    # Results are texts, not for a terminal.
    variables = {"NO_COLOR": "1"}
    kernel = "/usr/local/bin/deno"

    def command(self, connection):
        return [self.kernel, "jupyter", "--kernel", "--conn", connection]

    def is_installed(self):
        return os.path.exists(self.kernel)

    def export(self, variables):
        return (
            f"for (const [name, value] of Object.entries({json.dumps(variables)})) "
            "Deno.env.set(name, value as string);"
        )

    def enter(self, variables):
        return (
            f"(() => {{ const now = {json.dumps(variables)} as any, before = {{}} as any; "
            "for (const name in now) { before[name] = Deno.env.get(name); Deno.env.set(name, now[name]); } "
            "(globalThis as any)[Symbol.for('forkd.before')] = before; })();"
        )

    def leave(self, variables):
        return (
            "(() => { const before = (globalThis as any)[Symbol.for('forkd.before')] ?? {}; "
            "for (const name in before) if (before[name] === undefined) Deno.env.delete(name); "
            "else Deno.env.set(name, before[name]); })();"
        )


ALL = {language.name: language for language in (Python(), JavaScript(), TypeScript(), Bash())}


def installed():
    """The languages of this image, by name."""
    return {name: language for name, language in ALL.items() if language.is_installed()}
