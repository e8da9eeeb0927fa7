"""``python -m pycriticalkv``."""

import sys

from pycriticalkv.cli import main

sys.exit(main())
