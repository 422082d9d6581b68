"""Transformers models, independent of backends: built on meta, read slice by slice, named as on the hub."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.kinds import experts_of as experts_of
    from corerl.models.attention import attention_in_pieces as attention_in_pieces
    from corerl.models.attention import carries_state as carries_state
    from corerl.models.attention import register_packed_attention as register_packed_attention
    from corerl.models.build import VALUE_HEAD as VALUE_HEAD
    from corerl.models.build import VALUE_HEAD_WEIGHT as VALUE_HEAD_WEIGHT
    from corerl.models.build import architecture_of as architecture_of
    from corerl.models.build import build_on_meta as build_on_meta
    from corerl.models.build import decoder_layers as decoder_layers
    from corerl.models.build import materialize as materialize
    from corerl.models.build import move_buffers as move_buffers
    from corerl.models.build import named_weights as named_weights
    from corerl.models.build import own_attention as own_attention
    from corerl.models.build import recompute_layers as recompute_layers
    from corerl.models.build import stored_buffers as stored_buffers
    from corerl.models.config import context_length as context_length
    from corerl.models.config import hf_config as hf_config
    from corerl.models.config import reads_pictures as reads_pictures
    from corerl.models.files import Described as Described
    from corerl.models.files import initial_source as initial_source
    from corerl.models.files import kept_files as kept_files
    from corerl.models.files import meta_model as meta_model
    from corerl.models.files import model_files as model_files
    from corerl.models.files import shapes_of_tower as shapes_of_tower
    from corerl.models.layouts import Policy as Policy
    from corerl.models.layouts import WholePolicy as WholePolicy
    from corerl.models.layouts import choose_layout as choose_layout
    from corerl.models.layouts import make_policy as make_policy
    from corerl.models.layouts import unread_parameters as unread_parameters
    from corerl.models.lora import peft_config as peft_config
    from corerl.models.lora import put_adapters as put_adapters
    from corerl.models.lora import targets_in as targets_in
    from corerl.models.lora import trained_parameters as trained_parameters
    from corerl.models.names import HFBox as HFBox
    from corerl.models.names import buffer_chunks as buffer_chunks
    from corerl.models.names import hf_boxes as hf_boxes
    from corerl.models.names import local_chunks as local_chunks
    from corerl.models.names import named_views as named_views
    from corerl.models.names import shapes_of as shapes_of
    from corerl.models.parts import parts_of as parts_of
    from corerl.models.parts import size_of as size_of
    from corerl.models.routing import Routers as Routers
    from corerl.models.routing import routers as routers
    from corerl.models.tokenizer import end_tokens as end_tokens
    from corerl.models.tokenizer import load_tokenizer as load_tokenizer
    from corerl.models.tokenizer import plain as plain
    from corerl.models.tokenizer import special_tokens as special_tokens
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
