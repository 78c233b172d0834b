"""The transfer engine: the names of the native module that belong to it, and nothing else."""

from snowskin._native import mooncake as _native

SUPPORT_CUDA = _native.SUPPORT_CUDA
SUPPORT_EFA = _native.SUPPORT_EFA
SUPPORT_HIP = _native.SUPPORT_HIP
SUPPORT_INTRA_NVLINK = _native.SUPPORT_INTRA_NVLINK
SUPPORT_MNNVL = _native.SUPPORT_MNNVL
SUPPORT_MUSA = _native.SUPPORT_MUSA

CoroRPCInterface = _native.RpcInterface
InnerTransferEngine = _native.InnerTransferEngine
ReceivedData = _native.ReceivedData
ReceivedTensor = _native.ReceivedTensor
RpcInterface = _native.RpcInterface
SharedSegment = _native.SharedSegment
TransferEngine = _native.TransferEngine
TransferNotify = _native.TransferNotify
TransferOpcode = _native.TransferOpcode

Read = TransferOpcode.Read
Write = TransferOpcode.Write

create_rpc_client = _native.create_rpc_client
create_rpc_server = _native.create_rpc_server
