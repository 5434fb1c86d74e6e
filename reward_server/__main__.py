"""``python -m reward_server`` is ``reward-server``."""

import sys

from reward_server.cli import main

sys.exit(main())
