"""Exit code 0 if this container's program does its work, else 1 with the reason: what HEALTHCHECK runs.

python docker/health.py gateway     its HTTP API answers (Redis may be away: a restart would not bring it back)
python docker/health.py worker      Redis has had a sign of life of this host's worker lately
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request

TIMEOUT_S = 3.0


def gateway() -> str | None:
    port = os.environ.get("REWARD_SERVER_PORT", "8000")
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=TIMEOUT_S).close()
    except OSError as error:
        return f"the gateway does not answer: {error}"
    return None


def worker() -> str | None:
    import redis  # here, since the gateway's check needs neither

    from reward_server import scripts
    from reward_server.queue import GRACE_S, PREFIX, WorkerInfo

    host = socket.gethostname()
    client = redis.Redis.from_url(
        os.environ["REWARD_SERVER_REDIS_URL"], decode_responses=True, socket_timeout=TIMEOUT_S
    )
    try:
        rows = client.register_script(scripts.WORKERS)(keys=[PREFIX], args=[round(GRACE_S * 1000)])
    except redis.RedisError as error:
        return f"Redis does not answer: {error}"
    for text, silent_ms, _ in rows:
        info = WorkerInfo(**json.loads(text))
        if info.host == host and float(silent_ms) < info.silence_ms:
            return None
    return f"no sign of life of a worker on {host}"


def main() -> int:
    checks = {"gateway": gateway, "worker": worker}
    if len(sys.argv) != 2 or sys.argv[1] not in checks:
        print(f"usage: health.py {'|'.join(checks)}", file=sys.stderr)
        return 2
    problem = checks[sys.argv[1]]()
    if problem:
        print(problem)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
