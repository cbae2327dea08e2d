// Moves rows on the CPU by lists of checked ids, on torch's threads. Called by the ops' CPU paths.
// Memory latency dominates the cost of a random row, so loops that read random rows prefetch
// them several ids ahead. Each written row belongs to one thread, which makes repeated ids
// deterministic without locks. The caller has checked ids and widths (no row is empty), and that
// the table overlaps neither `out` nor `src`.
#pragma once

#include "core/tensor_checks.h"
#include "move/number_kind.h"

namespace speedtorch {

// out[i] = table[ids[i]].
void gather_on_cpu(const Rows& table, const Ids& ids, const Rows& out);
// table[ids[i]] = src[i]; for repeated ids the last in index order wins.
void scatter_on_cpu(const Rows& table, const Ids& ids, const Rows& src);
// table[ids[i]] += src[i] in index order, rounded to the kind's type at each addition.
void add_on_cpu(const Rows& table, const Ids& ids, const Rows& src, NumberKind kind);
// to[to_places[i]] = from[from_places[i]] for i < count, of any width; null places mean i. No row
// may be written twice.
void move_on_cpu(const Rows& from, const int64_t* from_places, const Rows& to,
                 const int64_t* to_places, int64_t count);

}  // namespace speedtorch
