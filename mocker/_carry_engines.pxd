# State of vLLM and TRT-LLM cores to bytes and back; see _carry.pxd.
from mocker._carry cimport Carrier
from mocker._common cimport int32_t
from mocker._core cimport Core
from mocker._hooks cimport AdmissionHook
from mocker._kv cimport Path
from mocker._ranks cimport Ranks
from mocker._rules cimport VllmRulesCore
from mocker._timing cimport Timing


cdef void path_carry(Carrier* io, Path* path, int32_t tokens_per_block) noexcept nogil
cdef void timing_carry(Carrier* io, Timing* t) noexcept nogil
cdef void ranks_carry(Carrier* io, Ranks* r) noexcept nogil
cdef void wishes_carry(Carrier* io, AdmissionHook* h, AdmissionHook* before) noexcept nogil
cdef void core_carry(Carrier* io, Core* c) noexcept nogil
cdef void rules_carry(Carrier* io, VllmRulesCore* x) noexcept nogil
