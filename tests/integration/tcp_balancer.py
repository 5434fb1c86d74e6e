"""One TCP address in front of several gateways, for tests: ``tcp_balancer.py HOST:PORT BACKEND:PORT...``

Connections go to the backends in turn. A backend that does not answer ``GET /healthz`` within a second gets no new
ones, and those that it has are closed: a host that went silent ends none by itself.
"""

import asyncio
import itertools
import sys
import time


class Balancer:
    def __init__(self, backends):
        self._clients = {backend: set() for backend in backends}  # open connections
        self._turns = itertools.cycle(backends)
        self._healthy = set()

    async def run(self, address):
        async with await asyncio.start_server(self._serve, *address.split(":")):
            await asyncio.gather(*map(self._watch, self._clients))

    async def _serve(self, reader, writer):
        backend = next((b for b in itertools.islice(self._turns, len(self._clients)) if b in self._healthy), None)
        try:
            there, back = await asyncio.open_connection(*backend.split(":")) if backend else (None, None)
        except OSError:
            back = None
        if back is None:
            writer.close()
            return
        self._clients[backend].add(writer)
        await asyncio.gather(_copy(reader, back), _copy(there, writer))
        self._clients[backend].discard(writer)

    async def _watch(self, backend):
        while True:
            try:
                healthy = await asyncio.wait_for(_is_healthy(backend), 1)
            except (OSError, TimeoutError):
                healthy = False
            if healthy != (backend in self._healthy):
                print(f"{time.monotonic():.1f}: {backend} is {'up' if healthy else 'down'}", flush=True)
            if healthy:
                self._healthy.add(backend)
            else:
                self._healthy.discard(backend)
                for writer in list(self._clients[backend]):
                    writer.transport.abort()
            await asyncio.sleep(0.2)


async def _copy(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


async def _is_healthy(backend):
    reader, writer = await asyncio.open_connection(*backend.split(":"))
    try:
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        return b" 200 " in await reader.readline()
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(Balancer(sys.argv[2:]).run(sys.argv[1]))
