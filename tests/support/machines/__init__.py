"""Several machines on one Linux box: namespaces with host names, addresses, links and folders of their own."""

from tests.support.machines.machine import Machine, MachineProcess
from tests.support.machines.plan import RigError
from tests.support.machines.requirements import unavailable
from tests.support.machines.rig import Rig

__all__ = ["Machine", "MachineProcess", "Rig", "RigError", "unavailable"]
