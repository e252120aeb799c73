"""``python -m shardscope``: the program ``shardscope``, where the folder of scripts is not on the PATH."""

import sys

from shardscope.cli.main import main

sys.exit(main())
