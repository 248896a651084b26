"""All faults, by kind."""

from tests.faults.gradients import GRADIENTS
from tests.faults.structure import STRUCTURE
from tests.faults.targets import TARGETS

MUTATIONS = sorted([*TARGETS, *GRADIENTS, *STRUCTURE], key=lambda mutation: mutation.kind)
