import sys
from pathlib import Path

# Last, so that an installed parallel_ops is not shadowed by the source tree.
sys.path.append(str(Path(__file__).parents[2]))
