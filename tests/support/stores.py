"""A local S3 server."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
import pytest


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Run a server with the bucket ``bucket``; yield the options of its file system."""
    pytest.importorskip("s3fs", reason="needs the extra cloud")
    moto = pytest.importorskip("moto.server", reason="needs the extra dev")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    with suppress(FileExistsError):  # The servers of a process share their buckets.
        fsspec.filesystem("s3", **options).mkdir("bucket")
    yield options
    running.stop()
