"""A blocking client run in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")


class Threaded:
    """Run a blocking client's methods in one thread of its own."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def _call(self, method: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))

    async def close(self) -> None:
        """Close the client and its thread."""
        raise NotImplementedError

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
