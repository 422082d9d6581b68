"""CoreRL's runs on more or fewer devices: resized by command or by a scaler, and continued when machines are lost."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl_elastic.changing import resize as resize
    from corerl_elastic.changing import restart_by as restart_by
    from corerl_elastic.changing import sizes_of as sizes_of
    from corerl_elastic.scaling import Devices as Devices
    from corerl_elastic.scaling import Sizing as Sizing
    from corerl_elastic.scaling import Spent as Spent
    from corerl_elastic.scaling import balance as balance
else:
    from corerl.plugin import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
