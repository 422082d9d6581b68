"""The driver's side of a run: assemble its parts, direct them for the loop, and shut them down."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.driver.groups import RunGroups as RunGroups
    from corerl.driver.groups import with_colocated_ranks as with_colocated_ranks
    from corerl.driver.groups import with_devices as with_devices
    from corerl.driver.run_dir import is_occupied as is_occupied
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
