"""Elastic memory in user space: lend a reserve to a block pool, take it back before it is needed.

    driver = TwinDriver()                      # or CudaDriver(0)
    shape = Shape.fit(layers=2, block_bytes=16384, base_blocks=80, lent_blocks=16,
                      granularity=driver.granularity)
    memory = ElasticMemory(driver, shape)
    memory.lend()                              # 16 more blocks in every layer
    memory.return_()                           # and back; the KV pointers never changed
    memory.close()

`docs/elastic.md` is the guide.  Nothing here needs vLLM; `tensors` needs torch.
"""

from kvclaims.bridge.vmm.blocks import BlockPool, StillHeld, StillRead
from kvclaims.bridge.vmm.driver import Driver, DriverError, Failing, Misuse, OutOfMemory
from kvclaims.bridge.vmm.memory import ElasticMemory, Mode, Refused, Shape, Tenants
from kvclaims.bridge.vmm.twin import TwinDriver

__all__ = [
    "BlockPool",
    "Driver",
    "DriverError",
    "ElasticMemory",
    "Failing",
    "Misuse",
    "Mode",
    "OutOfMemory",
    "Refused",
    "Shape",
    "StillHeld",
    "StillRead",
    "Tenants",
    "TwinDriver",
]
