"""One file per aggregation method. A method is arithmetic on a Gram; it never touches a parameter.

Importing any of them registers all, so that the list of methods is always whole.
"""

from fastagg.methods import (  # noqa: F401
    centred_clipping,
    cfl,
    cwfedavg,
    fedadp,
    fedamp,
    fedavg,
    fedawa,
    feddisco,
    fedlaw,
    fednova,
    fedopt,
    geometric_median,
    krum,
    ldawa,
    simagg,
    simprox,
    weiavg,
)
