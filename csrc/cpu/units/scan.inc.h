// Rank 1 with a causal mask in linear time, and streams. See cpu/isa.h for how units are compiled.
namespace boltzattn::BOLTZATTN_ISA {

#include "cpu/units/common.h"
#include "cpu/transform/extents.h"
#include "cpu/transform/coordinates.h"
#include "cpu/transform/rows.h"
#include "cpu/transform/for_heads.h"
#include "cpu/scan/chunk.h"
#include "cpu/scan/table.h"
#include "cpu/scan/forward.h"
#include "cpu/scan/backward.h"
#include "cpu/scan/stream.h"
#include "cpu/scan/shards.h"

BOLTZATTN_OFFER(scan_forward)
BOLTZATTN_OFFER(scan_backward)
BOLTZATTN_OFFER(shard_tables)
BOLTZATTN_OFFER(shard_forward)
BOLTZATTN_OFFER(shard_rows)
BOLTZATTN_OFFER(shard_backward)

}  // namespace boltzattn::BOLTZATTN_ISA
