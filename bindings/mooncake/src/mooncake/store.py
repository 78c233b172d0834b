"""The object store: the names of the native module that belong to it, and nothing else."""

from snowskin._native import mooncake as _native

BufferHandle = _native.BufferHandle
BufferLease = RegisteredBufferLease = _native.BufferLease
BufferLeaseView = RegisteredBufferLeaseView = _native.BufferLeaseView
BufferPool = RegisteredBufferPool = _native.BufferPool
Descriptor = _native.Descriptor
DiskDescriptor = _native.DiskDescriptor
EngramStore = _native.EngramStore
EngramStoreConfig = _native.EngramStoreConfig
MemoryDescriptor = _native.MemoryDescriptor
MooncakeDistributedNoFRegister = _native.MooncakeDistributedNoFRegister
MooncakeDistributedStore = _native.MooncakeDistributedStore
MooncakeHostMemAllocator = _native.MooncakeHostMemAllocator
ObjectDataType = _native.ObjectDataType
ParallelAxis = _native.ParallelAxis
QueryTaskResponse = _native.QueryTaskResponse
ReadTarget = _native.ReadTarget
ReplicaDescriptor = _native.ReplicaDescriptor
ReplicaStatus = _native.ReplicaStatus
ReplicateConfig = _native.ReplicateConfig
SoftPinAction = _native.SoftPinAction
TaskStatus = _native.TaskStatus
TaskType = _native.TaskType
TensorParallelism = _native.TensorParallelism

# Members that the module has by themselves. Two enumerations have a FAILED and a PROCESSING: the module's are
# those of TaskStatus. SoftPinAction has none here.
ACTIVATION = ObjectDataType.ACTIVATION
GENERAL = ObjectDataType.GENERAL
GRADIENT = ObjectDataType.GRADIENT
KVCACHE = ObjectDataType.KVCACHE
METADATA = ObjectDataType.METADATA
OPTIMIZER_STATE = ObjectDataType.OPTIMIZER_STATE
SAMPLE = ObjectDataType.SAMPLE
TENSOR = ObjectDataType.TENSOR
UNKNOWN = ObjectDataType.UNKNOWN
WEIGHT = ObjectDataType.WEIGHT
COMPLETE = ReplicaStatus.COMPLETE
INITIALIZED = ReplicaStatus.INITIALIZED
REMOVED = ReplicaStatus.REMOVED
UNDEFINED = ReplicaStatus.UNDEFINED
REPLICA_COPY = TaskType.REPLICA_COPY
REPLICA_MOVE = TaskType.REPLICA_MOVE
FAILED = TaskStatus.FAILED
PENDING = TaskStatus.PENDING
PROCESSING = TaskStatus.PROCESSING
SUCCESS = TaskStatus.SUCCESS

bind_to_numa_node = _native.bind_to_numa_node
get_alloc_func_addr = _native.get_alloc_func_addr
get_free_func_addr = _native.get_free_func_addr
_deserialize_tensor = _native._deserialize_tensor
_get_pyclient_from_wrapper = _native._get_pyclient_from_wrapper
_serialize_tensor = _native._serialize_tensor
_tensor_metadata_size = _native._tensor_metadata_size
