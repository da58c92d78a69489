"""The documents' commands read samples that the tests of other rooms make, too."""

import sys

from places import ROOT

for room in ("evaluation", "weights"):
    sys.path.append(str(ROOT / "tests" / room))
