"""The Python tool of crewai-tools works in a sandbox, as published. The client that it pins knows no E2B_SANDBOX_URL: it
builds the names of hosts from E2B_DOMAIN, and speaks TLS with them. This program resolves the names below its domain to a
server of its own, which ends TLS before the daemon's plain port, as docs/E2B.md says of a reverse proxy.

Environment: E2B_API_URL, E2B_API_KEY.
"""

import os
import pathlib
import socket
import ssl
import subprocess
import tempfile
import threading
from urllib.parse import urlsplit

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", OTEL_SDK_DISABLED="true", CREWAI_TRACING_ENABLED="false")

DOMAIN = "forkd.test"
TEMPLATE = "code-interpreter-v1"
daemon = urlsplit(os.environ["E2B_API_URL"])


def certificate(folder):
    """A certificate for all names below the domain, and its key, in one file."""
    file = folder / "both.pem"
    names = f"subjectAltName=DNS:{DOMAIN},DNS:*.{DOMAIN}"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={DOMAIN}"]
    subprocess.run([*request, "-addext", names, "-keyout", file, "-out", folder / "certificate.pem"], check=True, capture_output=True)
    with open(file, "a") as both:
        both.write((folder / "certificate.pem").read_text())
    return file


def copy(source, target, change=lambda piece: piece):
    try:
        while piece := source.recv(65536):
            target.sendall(change(piece))
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def serve(listener, context):
    def forward(plain):
        try:
            with context.wrap_socket(plain, server_side=True) as client:
                with socket.create_connection((daemon.hostname, daemon.port)) as upstream:
                    back = threading.Thread(target=copy, args=(upstream, client), daemon=True)
                    back.start()
                    # The daemon's plain port has one name, but for the names of sandboxes.
                    copy(client, upstream, lambda piece: piece.replace(API, daemon.netloc.encode()))
                    back.join()
        except OSError:
            pass

    while True:
        threading.Thread(target=forward, args=(listener.accept()[0],), daemon=True).start()


folder = tempfile.TemporaryDirectory()
pem = certificate(pathlib.Path(folder.name))
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(pem)
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
API = f"api.{DOMAIN}:{port}".encode()
threading.Thread(target=serve, args=(listener, context), daemon=True).start()

resolve = socket.getaddrinfo


def getaddrinfo(host, *args, **kwargs):
    name = host.decode() if isinstance(host, bytes) else host
    return resolve("127.0.0.1" if name and name.endswith(f".{DOMAIN}") else host, *args, **kwargs)


socket.getaddrinfo = getaddrinfo
for variable in ("E2B_API_URL", "E2B_SANDBOX_URL"):
    os.environ.pop(variable, None)
os.environ.update(E2B_DOMAIN=f"{DOMAIN}:{port}", SSL_CERT_FILE=str(pathlib.Path(folder.name) / "certificate.pem"))

from crewai_tools import E2BPythonTool  # noqa: E402

# One sandbox for two calls, which share the kernel's memory.
tool = E2BPythonTool(template=TEMPLATE, persistent=True)
try:
    first = tool.run(code="import os\ntotal = 40\nprint(os.environ.get('UNIT'))", envs={"UNIT": "eggs"})
    assert "".join(first["stdout"]) == "eggs\n" and first["error"] is None, first
    second = tool.run(code="total + 2")
    assert second["text"] == "42", second
    failed = tool.run(code="1 / 0")
    assert failed["error"]["name"] == "ZeroDivisionError", failed
finally:
    tool.close()
print("crewai-tools' Python tool works over E2B_DOMAIN")
