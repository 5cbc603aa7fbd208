"""Serve a broker's application by uvicorn, over TLS, with logs of one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import sys
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any

import uvicorn

from fastrack._broker.app import LOGGER
from fastrack._crypto.keys import read_private

_CONNECTIONS = 256


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON: time, level, message, and the members of ``extra={"fields": ...}``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
        return json.dumps(line)


def serve(
    app: Any,
    *,
    host: str,
    port: int,
    certificate: str | os.PathLike[str] | None,
    private_key: str | os.PathLike[str] | None,
) -> None:
    """Serve until the process is asked to end. Without a certificate only on a loopback address.

    Raises
    ------
    KeyPermissionError
        If others may use the key of the certificate, or own it.
    OSError
        If the address, the certificate or its key cannot be used.
    ValueError
        If there is no certificate, and `host` is no loopback address.
    """
    if certificate is None and not ip_address(host).is_loopback:
        raise ValueError(f"serving failed: expected a certificate, or a loopback address, got none and {host}")
    if private_key is not None:
        with read_private(private_key, 0):  # refused here if others may use it; uvicorn opens it again
            pass
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in ((LOGGER, logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=10,
        ssl_certfile=None if certificate is None else os.fspath(certificate),
        ssl_keyfile=None if private_key is None else os.fspath(private_key),
    )
    config.load()
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_CONNECTIONS) as listener:
        fields = {"host": host, "port": listener.getsockname()[1], "tls": config.ssl is not None}
        logging.getLogger(LOGGER).info("listening", extra={"fields": fields})
        uvicorn.Server(config).run(sockets=[listener])
