"""Serves an ASGI application on a loopback port, in a thread."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

HOST = "127.0.0.1"  # and no option to change it: whoever loads a kernel runs what this server sends


@contextlib.contextmanager
def serve(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """Serve `app` while the block runs; gives its address. Port 0 takes a free one. OSError if the port is taken."""
    with socket.create_server((HOST, port)) as listener:
        # Or an answer's body waits for the acknowledgement of its header: 40 ms a request.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_level="critical")
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="local-hub", daemon=True)
        thread.start()
        try:
            yield f"http://{HOST}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
