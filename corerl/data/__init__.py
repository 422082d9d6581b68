"""Prompts in, packed micro-batches out."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.data.chat import parse_json as parse_json
    from corerl.data.chat import read_message as read_message
    from corerl.data.files import JsonlRows as JsonlRows
    from corerl.data.files import Refused as Refused
    from corerl.data.files import Rows as Rows
    from corerl.data.files import require_no_choice as require_no_choice
    from corerl.data.files import unreadable as unreadable
    from corerl.data.packing import plan_forward as plan_forward
    from corerl.data.packing import plan_steps as plan_steps
    from corerl.data.prompts import MixtureComponent as MixtureComponent
    from corerl.data.prompts import Prompt as Prompt
    from corerl.data.prompts import PromptSource as PromptSource
    from corerl.data.prompts import split as split
    from corerl.data.rows import load_prompts as load_prompts
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
