"""One TOML file in, one frozen Config out; imports neither torch nor ray."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.config.functions import imported as imported
    from corerl.config.functions import require_callable as require_callable
    from corerl.config.load import CONFIG_FILE as CONFIG_FILE
    from corerl.config.load import as_config as as_config
    from corerl.config.load import config_of as config_of
    from corerl.config.load import dump_toml as dump_toml
    from corerl.config.load import load_config as load_config
    from corerl.config.load import load_with_table as load_with_table
    from corerl.config.load import recorded as recorded
    from corerl.config.options import above as above
    from corerl.config.options import at_least as at_least
    from corerl.config.options import between as between
    from corerl.config.options import finite as finite
    from corerl.config.options import option as option
    from corerl.config.sampling import DataConfig as DataConfig
    from corerl.config.sampling import RewardConfig as RewardConfig
    from corerl.config.sampling import RolloutConfig as RolloutConfig
    from corerl.config.schema import ClusterInfo as ClusterInfo
    from corerl.config.schema import Config as Config
    from corerl.config.schema import RoleConfig as RoleConfig
    from corerl.config.schema import WeightsConfig as WeightsConfig
    from corerl.config.structuring import structure as structure
    from corerl.config.structuring import try_structure as try_structure
    from corerl.config.toml_text import class_fields as class_fields
    from corerl.config.toml_text import spell as spell
    from corerl.config.toml_text import to_plain as to_plain
    from corerl.config.toml_text import toml_key as toml_key
    from corerl.config.toml_text import toml_value as toml_value
    from corerl.config.training import ALL_LINEAR as ALL_LINEAR
    from corerl.config.training import EXPERTS as EXPERTS
    from corerl.config.training import LoraConfig as LoraConfig
    from corerl.config.training import ModelConfig as ModelConfig
    from corerl.config.training import OptimizerConfig as OptimizerConfig
    from corerl.config.training import TrainConfig as TrainConfig
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
