from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProcessKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROCESS_KIND_UNSPECIFIED: _ClassVar[ProcessKind]
    PROCESS_KIND_SUPERVISOR: _ClassVar[ProcessKind]
    PROCESS_KIND_SERVER: _ClassVar[ProcessKind]
    PROCESS_KIND_TOKENIZER: _ClassVar[ProcessKind]
    PROCESS_KIND_SCHEDULER: _ClassVar[ProcessKind]
    PROCESS_KIND_WORKER: _ClassVar[ProcessKind]
    PROCESS_KIND_DETOKENIZER: _ClassVar[ProcessKind]

class ProcessState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROCESS_STATE_UNSPECIFIED: _ClassVar[ProcessState]
    PROCESS_STATE_STARTING: _ClassVar[ProcessState]
    PROCESS_STATE_READY: _ClassVar[ProcessState]
    PROCESS_STATE_STOPPED: _ClassVar[ProcessState]
    PROCESS_STATE_DEAD: _ClassVar[ProcessState]
PROCESS_KIND_UNSPECIFIED: ProcessKind
PROCESS_KIND_SUPERVISOR: ProcessKind
PROCESS_KIND_SERVER: ProcessKind
PROCESS_KIND_TOKENIZER: ProcessKind
PROCESS_KIND_SCHEDULER: ProcessKind
PROCESS_KIND_WORKER: ProcessKind
PROCESS_KIND_DETOKENIZER: ProcessKind
PROCESS_STATE_UNSPECIFIED: ProcessState
PROCESS_STATE_STARTING: ProcessState
PROCESS_STATE_READY: ProcessState
PROCESS_STATE_STOPPED: ProcessState
PROCESS_STATE_DEAD: ProcessState

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "served_names", "max_model_len", "vocab_size", "tokenizer_vocab_size", "eos_token_ids", "has_chat_template", "dtype", "device", "kv_bytes_per_token", "num_pages", "page_size", "max_num_seqs", "max_num_batched_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    served_names: _containers.RepeatedScalarFieldContainer[str]
    max_model_len: int
    vocab_size: int
    tokenizer_vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    dtype: str
    device: str
    kv_bytes_per_token: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    def __init__(self, model: _Optional[str] = ..., served_names: _Optional[_Iterable[str]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., num_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("address", "limits", "versions", "processes", "uptime_seconds", "draining")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    address: str
    limits: Limits
    versions: _containers.ScalarMap[str, str]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    uptime_seconds: float
    draining: bool
    def __init__(self, address: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., uptime_seconds: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_in_flight_requests", "max_in_flight_bytes", "max_stream_buffer_bytes", "max_prompt_bytes", "max_chat_messages", "max_model_len", "max_stop_strings", "max_stop_string_bytes", "max_stop_token_ids", "max_logprobs", "max_logit_bias", "max_request_id_bytes", "max_cache_salt_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAM_BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHAT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHE_SALT_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_in_flight_requests: int
    max_in_flight_bytes: int
    max_stream_buffer_bytes: int
    max_prompt_bytes: int
    max_chat_messages: int
    max_model_len: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_logprobs: int
    max_logit_bias: int
    max_request_id_bytes: int
    max_cache_salt_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_in_flight_requests: _Optional[int] = ..., max_in_flight_bytes: _Optional[int] = ..., max_stream_buffer_bytes: _Optional[int] = ..., max_prompt_bytes: _Optional[int] = ..., max_chat_messages: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_string_bytes: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_logit_bias: _Optional[int] = ..., max_request_id_bytes: _Optional[int] = ..., max_cache_salt_bytes: _Optional[int] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("kind", "index", "pid", "title", "state", "rss_bytes", "cpu_seconds", "restarts", "counters", "rank", "histograms")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class HistogramsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Histogram
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    kind: ProcessKind
    index: int
    pid: int
    title: str
    state: ProcessState
    rss_bytes: int
    cpu_seconds: float
    restarts: int
    counters: _containers.ScalarMap[str, float]
    rank: int
    histograms: _containers.MessageMap[str, Histogram]
    def __init__(self, kind: _Optional[_Union[ProcessKind, str]] = ..., index: _Optional[int] = ..., pid: _Optional[int] = ..., title: _Optional[str] = ..., state: _Optional[_Union[ProcessState, str]] = ..., rss_bytes: _Optional[int] = ..., cpu_seconds: _Optional[float] = ..., restarts: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., rank: _Optional[int] = ..., histograms: _Optional[_Mapping[str, Histogram]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("in_flight_requests", "in_flight_bytes", "replicas")
    IN_FLIGHT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    in_flight_requests: int
    in_flight_bytes: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaLoad]
    def __init__(self, in_flight_requests: _Optional[int] = ..., in_flight_bytes: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaLoad, _Mapping]]] = ...) -> None: ...

class ReplicaLoad(_message.Message):
    __slots__ = ("index", "running", "waiting", "pages_total", "pages_free", "pages_cached", "cache_hit_rate")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    index: int
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    cache_hit_rate: float
    def __init__(self, index: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., cache_hit_rate: _Optional[float] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted", "unknown")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("kinds", "seconds")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[ProcessKind]
    seconds: float
    def __init__(self, kinds: _Optional[_Iterable[_Union[ProcessKind, str]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ("kinds",)
    KINDS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[ProcessKind]
    def __init__(self, kinds: _Optional[_Iterable[_Union[ProcessKind, str]]] = ...) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, files: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchMetricsRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class WatchMetricsResponse(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    def __init__(self, processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ...) -> None: ...
