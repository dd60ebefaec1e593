// Vectors of e4m3 against its scalars: every code, and floats around every rounding. Says what differs; compiled for the machine and
// for a plain one.
#include <cstdio>
#include <vector>

#include "e4m3.h"

using namespace tp;

static int wrong = 0;
static void same(const char* what, uint32_t of, uint32_t a, uint32_t b) {
    if (a != b && wrong++ < 10) printf("%s of %08x: %08x and %08x\n", what, of, a, b);
}

static void check_codes() {
    e4m3 codes[256 + 64] = {};
    for (int i = 0; i < 256; ++i) codes[i].bits = uint8_t(i);
    for (int first = 0; first < 256; ++first)
        for (int n : {1, 7, 15, 16}) {
            float wide[16];
            store(wide, load_some(codes + first, n));
            for (int i = 0; i < 16; ++i)
                same("load", uint32_t(first + i), as_bits(wide[i]), i < n ? as_bits(to_float(codes[first + i])) : 0);
        }
    for (int first = 0; first < 256; first += 64) {
        v16 lanes;
        memcpy(&lanes, codes + first, 64);
        Pairs p = pairs(lanes);
        uint16_t near[32], far[32];
        memcpy(near, &p.first, 64);
        memcpy(far, &p.second, 64);
        for (int i = 0; i < 64; ++i) {
            uint16_t ours = (i & 2 ? far : near)[i / 4 * 2 + (i & 1)];
            same("pairs", uint32_t(first + i), ours, as_bits(to_float(codes[first + i])) >> 16);
        }
    }
}

static void check_floats() {
    std::vector<float> floats;
    for (uint32_t high = 0; high < 0x10000; ++high)
        for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) floats.push_back(as_float(high << 16 | low));
    for (size_t first = 0; first + 16 <= floats.size(); first += 16)
        for (int n : {5, 16}) {
            e4m3 codes[16] = {};
            store_some(codes, load(&floats[first]), n);
            for (int i = 0; i < 16; ++i) {
                e4m3 one{0};
                if (i < n) from_float(one, floats[first + size_t(i)]);
                same("store", as_bits(floats[first + size_t(i)]), codes[i].bits, one.bits);
            }
        }
}

int main() {
    check_codes();
    check_floats();
    return wrong ? 1 : 0;
}
