"""The C structs of `step.c`, field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p


class LinearStruct(Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("parts", c_int32),
        ("outs", c_int32 * 3),
    ]


class LayerStruct(Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
        ("qkv", LinearStruct),
        ("o", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
    ]


class ModelStruct(Structure):
    _fields_ = [
        ("layers", c_int32),
        ("width", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page", c_int32),
        ("eps", c_float),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("layer", POINTER(LayerStruct)),
        ("head", LinearStruct),
    ]


class SiteStruct(Structure):
    _fields_ = [("a", c_void_p), ("b", c_void_p)]


class AdapterStruct(Structure):
    _fields_ = [("sites", POINTER(SiteStruct)), ("rank", c_int32), ("scale", c_float)]


class StepStruct(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("threads", c_int32),
        ("table_width", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("table", c_void_p),
        ("adapters", c_void_p),
        ("scratch", c_void_p),
        ("logits", c_void_p),
    ]
