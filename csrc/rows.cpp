#include "rows.hpp"

#include <limits>
#include <memory>

namespace nb = nanobind;

namespace weightsync {

void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

const void* checked_table(const Rows& rows, size_t columns, bool or_signed) {
    const bool is_signed = or_signed && rows.dtype() == nb::dtype<int64_t>();
    if (!is_signed && rows.dtype() != nb::dtype<uint64_t>())
        refuse(or_signed ? "rows must have dtype uint64 or int64" : "rows must have dtype uint64");
    if (rows.ndim() != 2 || rows.shape(1) != columns)
        refuse("rows must have shape (n, " + std::to_string(columns) + ")");
    const bool empty = rows.shape(0) == 0;
    // The stride of an axis of length one means nothing.
    const bool contiguous = rows.stride(1) == 1 &&
                            (rows.shape(0) <= 1 || rows.stride(0) == static_cast<int64_t>(columns));
    if (!empty && !contiguous) refuse("rows must be C-contiguous");
    return rows.data();
}

const uint64_t* checked_rows(const Rows& rows, size_t columns) {
    return static_cast<const uint64_t*>(checked_table(rows, columns, false));
}

void check_range(uint64_t first, uint64_t nbytes, const char* what, size_t row) {
    if (nbytes > std::numeric_limits<uint64_t>::max() - first)
        refuse("row " + std::to_string(row) + ": " + what + " + nbytes exceeds 64 bits");
}

void check_span(const Span& span, bool copies, size_t row) {
    const auto source = reinterpret_cast<uint64_t>(span.source);
    const auto destination = reinterpret_cast<uint64_t>(span.destination);
    check_range(span.start, span.nbytes, "start", row);
    if (span.nbytes == 0) return;
    if (source == 0 || (copies && destination == 0))
        refuse("row " + std::to_string(row) + ": null pointer with nbytes > 0");
    check_range(source, span.nbytes, "source address", row);
    if (!copies) return;
    check_range(destination, span.nbytes, "destination address", row);
    if (source < destination + span.nbytes && destination < source + span.nbytes)
        refuse("row " + std::to_string(row) + ": source and destination overlap");
}

size_t checked_n_out(int64_t n_out) {
    if (n_out < 0) refuse("n_out must not be negative");
    return static_cast<size_t>(n_out);
}

Isa checked_isa(int isa) {
    const int best = static_cast<int>(best_isa());
    if (isa == -1) return static_cast<Isa>(best);
    if (isa < -1 || isa > 2) refuse("isa must be -1 (best), 0 (scalar), 1 (avx2) or 2 (avx512)");
    if (isa > best)
        refuse(std::string("this machine lacks ") + isa_name(static_cast<Isa>(isa)));
    return static_cast<Isa>(isa);
}

unsigned checked_threads(int threads) {
    if (threads < 1 || threads > 1024) refuse("threads must be between 1 and 1024");
    return static_cast<unsigned>(threads);
}

std::vector<Span> read_spans(const Rows& rows, bool copies, bool digests, size_t n_out) {
    const size_t columns = 2u + copies + (digests ? 3u : 0u);
    const uint64_t* row = checked_rows(rows, columns);
    std::vector<Span> spans(rows.shape(0));
    for (size_t i = 0; i < spans.size(); ++i, row += columns) {
        const uint64_t* next = row;
        Span& span = spans[i];
        span.source = reinterpret_cast<const uint8_t*>(*next++);
        if (copies) span.destination = reinterpret_cast<uint8_t*>(*next++);
        span.nbytes = *next++;
        if (digests) {
            span.start = *next++;
            span.seed = *next++;
            span.out = *next++;
            if (span.out >= n_out)
                refuse("row " + std::to_string(i) + ": out_index " + std::to_string(span.out) +
                       " is not below n_out " + std::to_string(n_out));
        }
        check_span(span, copies, i);
    }
    return spans;
}

Table to_table(const std::vector<Sums>& sums) {
    auto data = std::make_unique<uint64_t[]>(2 * sums.size());
    for (size_t i = 0; i < sums.size(); ++i) {
        data[2 * i] = sums[i].first;
        data[2 * i + 1] = sums[i].second;
    }
    uint64_t* released = data.release();
    nb::capsule owner(released, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
    return Table(released, {sums.size(), 2}, owner);
}

}  // namespace weightsync
