import sys

from fastagg.cli import main

sys.exit(main())
