#!/usr/bin/env python3
"""The main job, with times: boot a Linux guest of our own, run code in it, keep one and talk to it.

Expects `make build` to have run. Needs nothing but the standard library.
"""

import json
import pathlib
import shlex
import subprocess
import sys
import time
import urllib.request

FORKD = str(pathlib.Path(__file__).resolve().parent.parent / "target/release/forkd")
steps = []


def step(name, action):
    """Runs action, says how long it took, gives what it gave."""
    print(f"\n\033[1m{name}\033[0m" if sys.stdout.isatty() else f"\n{name}", flush=True)
    start = time.monotonic()
    result = action()
    seconds = time.monotonic() - start
    steps.append((name, seconds))
    print(f"  -> {seconds:.2f} s", flush=True)
    return result


def forkd(*args, **options):
    return subprocess.run([FORKD, *args], check=True, text=True, **options)


def run(*command):
    print("  $ forkd run --image python -- " + shlex.join(command), flush=True)
    code = subprocess.run([FORKD, "run", "--image", "python", "--", *command]).returncode
    print(f"  exit status {code}", flush=True)
    return code


class Daemon:
    """The REST API of the daemon the forkd command talks to."""

    def __init__(self):
        found = json.loads(forkd("token", "print", "--json", stdout=subprocess.PIPE).stdout)
        self.url, self.token = found["url"], found["token"]

    def call(self, method, path, body=None):
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.loads(response.read() or b"null")


def main():
    doctor = subprocess.run([FORKD, "doctor", "--json"], text=True, stdout=subprocess.PIPE).stdout
    checks = json.loads(doctor)
    kvm = next(check for check in checks["checks"] if check["name"] == "kvm")
    where = "this host's KVM" if checks["will_use"] == "kvm" else "the emulated machine (slow, but real KVM inside)"
    print(f"KVM: {kvm['detail']}\nGuests run on {where}.")

    if not any(image["name"] == "python" for image in json.loads(
            forkd("image", "ls", "--json", stdout=subprocess.PIPE).stdout)):
        step("Build the python image, once", lambda: forkd("image", "build", "python"))

    code = "import numpy; print(numpy.zeros(5).tolist())"
    if step("A fresh microVM for one command (the first one also starts the daemon)",
            lambda: run("python3", "-c", code)) != 0:
        sys.exit("the command failed")
    if step("Another one; the exit status is the command's", lambda: run("sh", "-c", "uname -sr; exit 7")) != 7:
        sys.exit("the exit status is wrong")

    daemon = Daemon()
    sandbox = step("A sandbox that stays", lambda: daemon.call("POST", "/v1/sandboxes", {"image": "python"}))[0]["id"]
    print(f"  {sandbox}")
    try:
        path = f"/v1/sandboxes/{sandbox}"
        answer = step("Run a command in it", lambda: daemon.call(
            "POST", path + "/exec", {"args": ["sh", "-c", "echo $(nproc) CPU, $(head -1 /proc/meminfo)"]}))
        print("  " + answer["stdout"].strip())
        step("Start its Python and import numpy", lambda: daemon.call(
            "POST", path + "/eval", {"code": "import numpy", "timeout_secs": 300}))
        answer = step("Evaluate in the warmed Python", lambda: daemon.call(
            "POST", path + "/eval", {"code": "numpy.arange(5).sum()"}))
        print("  " + str(answer["result"]))
    finally:
        step("Delete it", lambda: daemon.call("DELETE", path))

    print(f"\nWhat ran on {where}:")
    for name, seconds in steps:
        print(f"  {seconds:8.2f} s  {name}")
    if checks["will_use"] == "machine":
        print("\nThe emulated machine stays up for the next command; `forkd machine stop` ends it.")


if __name__ == "__main__":
    main()
