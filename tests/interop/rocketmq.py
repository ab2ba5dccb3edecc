"""A JVM with RocketMQ's own classes (java/src/main/java/interop)."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from tests.interop.java_process import JavaProcess

# By default each server makes an RSA key and a certificate for TLS, for more than a second of CPU.
NO_TLS = "-Dtls.server.mode=disabled"
_OPTIONS = (
    NO_TLS,
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
    "-Xms128m",
    "-Xmx768m",
    "-XX:MaxDirectMemorySize=1g",
    "-Djava.net.preferIPv4Stack=true",
    "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99",
    "-Drocketmq.client.rebalance.waitInterval=1000",
    "-Drocketmq.client.rebalance.minInterval=200",
)


class Peer(JavaProcess):
    """A JVM that can run RocketMQ's store, name server, broker and clients."""

    def __init__(
        self,
        program: tuple[str, str],
        folder: pathlib.Path,
        name: str,
        log: str = "WARN",
        options: Sequence[str] = (),
    ) -> None:
        home = {"ROCKETMQ_HOME": str(folder / f"{name}.home")}
        super().__init__(program, folder, name, [*_OPTIONS, *options, f"-Dpeer.log={log}"], home)
