"""The hook contract, and everything from a plugin's name to its checked, callable code."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.imports import on_demand as on_demand
    from corerl.plugin.capabilities import FULL as FULL
    from corerl.plugin.capabilities import Capability as Capability
    from corerl.plugin.capabilities import not_implemented as not_implemented
    from corerl.plugin.capabilities import unsupported as unsupported
    from corerl.plugin.events import CallFinished as CallFinished
    from corerl.plugin.events import CheckpointSaved as CheckpointSaved
    from corerl.plugin.events import Evaluated as Evaluated
    from corerl.plugin.events import Event as Event
    from corerl.plugin.events import Idle as Idle
    from corerl.plugin.events import Notice as Notice
    from corerl.plugin.events import PhaseProgress as PhaseProgress
    from corerl.plugin.events import PhaseStarted as PhaseStarted
    from corerl.plugin.events import RunFinished as RunFinished
    from corerl.plugin.events import RunRewound as RunRewound
    from corerl.plugin.events import RunStarted as RunStarted
    from corerl.plugin.events import SampleShown as SampleShown
    from corerl.plugin.events import Span as Span
    from corerl.plugin.events import StepFinished as StepFinished
    from corerl.plugin.hooks import BACKEND_HOOKS as BACKEND_HOOKS
    from corerl.plugin.hooks import Context as Context
    from corerl.plugin.hooks import ProcessFailure as ProcessFailure
    from corerl.plugin.hooks import RunControl as RunControl
    from corerl.plugin.origins import Origin as Origin
    from corerl.plugin.origins import plugins_here as plugins_here
    from corerl.plugin.origins import unmet as unmet
    from corerl.plugin.pictures import picture_inputs as picture_inputs
    from corerl.plugin.registry import EXTRAS as EXTRAS
    from corerl.plugin.registry import Entry as Entry
    from corerl.plugin.registry import Kind as Kind
    from corerl.plugin.registry import Loaded as Loaded
    from corerl.plugin.registry import installed_names as installed_names
    from corerl.plugin.registry import load as load
    from corerl.plugin.registry import load_implementation as load_implementation
    from corerl.plugin.registry import locate as locate
    from corerl.plugin.registry import scan as scan
    from corerl.plugin.registry import usable as usable
    from corerl.plugin.spec import API as API
    from corerl.plugin.spec import REINSTALL_TORCH as REINSTALL_TORCH
    from corerl.plugin.spec import UNMEASURED as UNMEASURED
    from corerl.plugin.spec import BackendSpec as BackendSpec
    from corerl.plugin.spec import CommandSpec as CommandSpec
    from corerl.plugin.spec import EngineSpec as EngineSpec
    from corerl.plugin.spec import Environment as Environment
    from corerl.plugin.spec import ExtensionSpec as ExtensionSpec
    from corerl.plugin.spec import Finding as Finding
    from corerl.plugin.spec import FormatSpec as FormatSpec
    from corerl.plugin.spec import Level as Level
    from corerl.plugin.spec import NoOptions as NoOptions
    from corerl.plugin.spec import PicturesSpec as PicturesSpec
    from corerl.plugin.spec import PlanAnswer as PlanAnswer
    from corerl.plugin.spec import Problem as Problem
    from corerl.plugin.spec import Process as Process
    from corerl.plugin.spec import RankMemory as RankMemory
    from corerl.plugin.spec import SamplerRun as SamplerRun
    from corerl.plugin.spec import SamplerSpec as SamplerSpec
    from corerl.plugin.spec import SlowPath as SlowPath
    from corerl.plugin.spec import TransportSpec as TransportSpec
    from corerl.plugin.spec import Variant as Variant
    from corerl.plugin.spec import check_library as check_library
    from corerl.plugin.spec import check_nccl as check_nccl
    from corerl.plugin.spec import ok as ok
    from corerl.plugin.spec import slow_attention as slow_attention
    from corerl.plugin.spec import version_numbers as version_numbers
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
