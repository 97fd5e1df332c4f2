// Vectors of float32 as wide as the target's registers, in the compilers' vector extensions: one source for AVX2,
// AVX-512, NEON and SSE. Includes no header of XLA: the stand-alone harness uses the same code.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// GCC takes longer to read this header than to compile most units; its built-in functions, which the header's are made of, need none.
#if defined(__clang__) && (defined(__F16C__) || defined(__AVX512VBMI__))
#include <immintrin.h>
#endif

namespace dsjax {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
// Half a vector where that is eight lanes, which some processors with AVX-512 multiply twice as fast as whole ones; else a vector.
constexpr int kNarrowLanes = kLanes == 16 ? 8 : kLanes;
typedef float NarrowVec __attribute__((vector_size(4 * kNarrowLanes)));
template <class V>
constexpr int lanes_of = sizeof(V) / sizeof(float);
// Vectors of integers with as many lanes as V has.
template <class V>
using IntsOf = decltype(V{} < V{});
typedef uint32_t UIntVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));

// Loads and stores of any alignment; the compilers turn the copies into single instructions.
template <class V, class T>
inline V load_as(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}
inline Vec load(const float* from) { return load_as<Vec>(from); }
template <class V>
inline void store(float* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// Keeps a value in its register here. Without it GCC turns a sum of products along one vector into products first and sums
// after, with another rounding than in tiles of several vectors; a result must not depend on the tile that it fell into.
template <class V>
inline void pin(V& value) {
  V held = value;  // or GCC keeps an array of what is pinned in memory as well
#if defined(__x86_64__)
  asm("" : "+v"(held));
#elif defined(__aarch64__)
  asm("" : "+w"(held));
#endif
  value = held;
}

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// A difference, because x - 0 is x for every x, which compilers know; x + 0 is not, for -0.
template <class V = Vec>
inline V broadcast(float value) {
  return value - V{};
}
template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

// `values` rounded up to whole vectors.
constexpr long whole_vectors(long values) { return (values + kLanes - 1) / kLanes * kLanes; }

inline float sum(Vec v) {
  float total = 0;
  for (int lane = 0; lane < kLanes; lane++) total += v[lane];
  return total;
}

// to[i] += from[i].
inline void add_row(const float* from, long count, float* to) {
  long i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(to + i) + load(from + i));
  for (; i < count; i++) to[i] += from[i];
}

// 1 / sqrt(mean(x^2) + eps) of the values x of a row.
inline float inverse_rms(const float* row, long width, float eps) {
  Vec squares{};
  long i = 0;
  for (; i + kLanes <= width; i += kLanes) squares += load(row + i) * load(row + i);
  float total = sum(squares);
  for (; i < width; i++) total = __builtin_fmaf(row[i], row[i], total);
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(width) + eps);
}

// e^x in float32, within 2 units in the last place for -87 <= x <= 88, above which x is held there; exactly 0 below
// -87. The polynomial is Cephes's expf (S. Moshier): x = n ln 2 + r, e^x = 2^n e^r.
template <class V>
inline V exp(V x) {
  const V shift = broadcast<V>(12582912.0f);  // 1.5 x 2^23: adding it rounds to an integer in the low bits
  V held = x < -87.0f ? broadcast<V>(-87.0f) : x;
  held = held > 88.0f ? broadcast<V>(88.0f) : held;
  V shifted = held * 1.44269504088896341f + shift;
  V n = shifted - shift;
  V r = held - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V p = broadcast<V>(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntsOf<V> exponent = (__builtin_convertvector(n, IntsOf<V>) + 127) << 23;
  V value = p * bits<V>(exponent);
  return x < -87.0f ? V{} : value;
}

// Fully unrolled loops of at most 16 turns, by ones or twos, so that arrays of vectors stay in registers.
#define DSJAX_EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)
#define DSJAX_EACH_PAIR(i, count) _Pragma("GCC unroll 16") for (int i = 0; i + 1 < (count); i += 2)

// Lane i of the result is lane pick(i) of a and b together; b's lanes are numbered after a's.
template <class V, class Pick, int... lane>
inline V shuffled(V a, V b, Pick pick, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, pick(lane)...);
#else
  constexpr IntsOf<V> order = {pick(lane)...};
  return __builtin_shuffle(a, b, order);
#endif
}
template <class V, class Pick>
inline V shuffled(V a, V b, Pick pick) {
  return shuffled(a, b, pick, std::make_integer_sequence<int, sizeof(V) / sizeof(V{}[0])>{});
}
template <class First, class Second>
inline void shuffle(Vec& a, Vec& b, First first, Second second) {
  const Vec shuffled_a = shuffled(a, b, first);
  b = shuffled(a, b, second), a = shuffled_a;
}

// Sets a to the lanes of a where (lane & step) == 0 and to those of b, moved up by step, elsewhere; and b to the remaining lanes.
template <int step>
inline void exchange(Vec& a, Vec& b) {
  auto low = [](int lane) { return lane & step ? kLanes + lane - step : lane; };
  shuffle(a, b, low, [](int lane) { return lane & step ? kLanes + lane : lane + step; });
}

template <int step>
inline void exchange_from(Vec (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; i++)
    if ((i & step) == 0) exchange<step>(rows[i], rows[i + step]);
  if constexpr (step * 2 < kLanes) exchange_from<step * 2>(rows);
}

// Of each four lanes, the first two of a and b in turn stay in a, and the last two in b: one instruction each.
inline void unpack(Vec& a, Vec& b) {
  auto low = [](int lane) { return lane / 4 * 4 + lane % 4 / 2 + lane % 2 * kLanes; };
  shuffle(a, b, low, [](int lane) { return lane / 4 * 4 + lane % 4 / 2 + 2 + lane % 2 * kLanes; });
}

// Rows of kLanes values become columns, in registers.
inline void transpose(Vec (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; i += 2) unpack(rows[i], rows[i + 1]);
  exchange_from<2>(rows);
  for (int i = 0; i < kLanes; i += 4) std::swap(rows[i + 1], rows[i + 2]);
}

// From a's and b's lanes in turn: the first half of them in a, the second in b.
inline void interleave(Vec& a, Vec& b) {
  auto first = [](int lane) { return lane / 2 + lane % 2 * kLanes; };
  shuffle(a, b, first, [](int lane) { return (kLanes + lane) / 2 + lane % 2 * kLanes; });
}

// The even lanes of a and then of b in a, and the odd ones in b: what `interleave` undoes.
inline void deinterleave(Vec& a, Vec& b) {
  shuffle(a, b, [](int lane) { return 2 * lane; }, [](int lane) { return 2 * lane + 1; });
}

// Interleaves a and b by bytes within each 16 bytes: the first eight of each, and (below) the last eight.
template <class Bytes>
inline UIntVec first_in_turn(Bytes a, Bytes b) {
  return (UIntVec)shuffled(a, b, [](int byte) { return byte / 16 * 16 + byte % 16 / 2 + byte % 2 * static_cast<int>(sizeof(Bytes)); });
}
template <class Bytes>
inline UIntVec last_in_turn(Bytes a, Bytes b) {
  return (UIntVec)shuffled(a, b, [](int byte) { return byte / 16 * 16 + 8 + byte % 16 / 2 + byte % 2 * static_cast<int>(sizeof(Bytes)); });
}

// Vectors of a matrix's row that are widened together; of some formats in another order than they lie in, which `order` undoes.
constexpr int kGroup = 4;
constexpr long kGroupColumns = kGroup * kLanes;

// What a quick widening has to say about the codes that it saw: nothing, where it is right for all.
struct AnyCode {
  void note(float) {}
  bool found() const { return false; }
};

// What a widening keeps in registers for all groups: nothing, where it needs no tables.
struct NoTables {};

// Base of formats that are widened without tables and have no quicker form that is wrong for some codes.
struct PlainWidening {
  typedef NoTables Held;
  typedef AnyCode Codes;
  static constexpr bool quick = false;
  static constexpr float kQuickUnit = 1;
};

// What a matrix's elements are stored as; each is widened to float32 exactly.
struct Float32 : PlainWidening {
  typedef float Stored;
  static Vec widen(const float* from) { return load(from); }
  static float widen_one(float value) { return value; }
  template <int vectors>
  static void widen_group(const float* from, Vec (&group)[vectors], Held) {
    DSJAX_EACH(v, vectors) group[v] = load(from + v * kLanes);
  }
  static void order(Vec (&)[kGroup]) {}
};

struct BFloat16 : PlainWidening {
  typedef uint16_t Stored;
  static Vec widen(const uint16_t* from) {
    return bits<Vec>(__builtin_convertvector(load_as<HalfVec>(from), UIntVec) << 16);
  }
  static float widen_one(uint16_t value) { return bits<float>(static_cast<uint32_t>(value) << 16); }
  // Of each two vectors the even columns and then the odd ones: a shift and a mask, where widening in order takes five instructions.
  template <int vectors>
  static void widen_group(const uint16_t* from, Vec (&group)[vectors], Held) {
    DSJAX_EACH_PAIR(v, vectors) {
      const UIntVec both = load_as<UIntVec>(from + v * kLanes);
      group[v] = bits<Vec>(both << 16), group[v + 1] = bits<Vec>(both & 0xffff0000u);
    }
  }
  static void order(Vec (&group)[kGroup]) {
    DSJAX_EACH_PAIR(v, kGroup) interleave(group[v], group[v + 1]);
  }
};

// e4m3fn: sign, four bits of exponent with bias 7, three of mantissa; no infinities, 0x7f and 0xff are NaN.
#if defined(__F16C__) && defined(__AVX2__) && !defined(__AVX512F__)
#define DSJAX_QUICK_FLOAT8
struct Float8 {
  static constexpr bool quick = true;
#else
struct Float8 : PlainWidening {
#endif
  typedef uint8_t Stored;
#if defined(__F16C__) && (defined(__AVX2__) || defined(__AVX512F__))
  typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));
  typedef int16_t Halves __attribute__((vector_size(2 * kLanes)));

  // A byte's seven lower bits are the exponent and the fraction of a float16 that is 2^-8 of its value, where they lie seven bits higher;
  // its sign is the half's, which widening a signed byte has put there. A NaN's exponent gets the bit that it lacks to be a half's NaN.
  template <class Shorts>
  static Shorts as_halves(Shorts signed_bytes) {
    const Shorts half = (signed_bytes << 7) & static_cast<int16_t>(0xbf80);
    return half | ((half + 0x80) & 0x4000);
  }
  static Vec convert_halves(Halves half) {
#if defined(__clang__) && defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps((__m256i)half);
#elif defined(__clang__)
    return (Vec)_mm256_cvtph_ps((__m128i)half);
#elif defined(__AVX512F__)
    return (Vec)__builtin_ia32_vcvtph2ps512_mask(half, Vec{}, static_cast<uint16_t>(-1), 4 /* the current rounding */);
#else
    return (Vec)__builtin_ia32_vcvtph2ps256(half);
#endif
  }
  static Vec widen(const uint8_t* from) {
    return convert_halves(as_halves(__builtin_convertvector(load_as<SignedBytes>(from), Halves))) * 256.0f;
  }
#else
  static Vec widen(const uint8_t* from) {
    // In two steps: GCC 12 converts bytes to 32 bits one by one.
    const UIntVec all = __builtin_convertvector(__builtin_convertvector(load_as<ByteVec>(from), HalfVec), UIntVec);
    const UIntVec nan = bits<UIntVec>(bits<IntVec>(all & 0x7f) == 0x7f) & 0x7fc00000u;
    return bits<Vec>(bits<UIntVec>(widen_number(all)) | nan);
  }
#endif
  // Widens the byte in the low eight bits of each lane, which is not NaN.
  static Vec widen_number(UIntVec byte) {
    const UIntVec magnitude = byte & 0x7f;
    const Vec normal = bits<Vec>((magnitude << 20) + (120u << 23));
    const Vec subnormal = __builtin_convertvector(bits<IntVec>(magnitude), Vec) * 0.001953125f;  // 2^-9
    const Vec value = bits<IntVec>(magnitude) < 8 ? subnormal : normal;
    return bits<Vec>(bits<UIntVec>(value) | ((byte & 0x80) << 24));
  }
  static float widen_one(uint8_t value) {
    uint8_t padded[kLanes] = {value};
    return widen(padded)[0];
  }
#if defined(__AVX512VBMI__)
  typedef uint8_t Bytes __attribute__((vector_size(64)));

  // The two upper bytes of a magnitude's float32; the lower two are zero.
  struct Tables {
    alignas(64) uint8_t high[128], low[128];
    constexpr Tables() : high(), low() {
      for (uint32_t magnitude = 0; magnitude < 128; magnitude++) {
        uint32_t value = (magnitude << 20) + (120u << 23);
        if (magnitude == 0x7f) value |= 0x7fc00000u;
        if (magnitude < 8) {
          int top = 0;
          while (magnitude >> top > 1) top++;
          value = magnitude ? (static_cast<uint32_t>(127 - 9 + top) << 23) + ((magnitude << (23 - top)) & 0x7fffffu) : 0;
        }
        high[magnitude] = value >> 24, low[magnitude] = value >> 16 & 0xff;
      }
    }
  };
  // A table in registers. GCC would load it again for each group: seven loads where one is enough took a fifth longer.
  struct Table {
    Bytes first, second;
    explicit Table(const uint8_t* table) : first(load_as<Bytes>(table)), second(load_as<Bytes>(table + 64)) { pin(first), pin(second); }
  };
  static const Tables& tables() {
    static constexpr Tables all{};
    return all;
  }
  struct Held {
    Table high{tables().high}, low{tables().low};
  };
  static Bytes look_up(const Table& table, Bytes index) {
#if defined(__clang__)
    return (Bytes)_mm512_permutex2var_epi8((__m512i)table.first, (__m512i)index, (__m512i)table.second);
#else
    return __builtin_shuffle(table.first, table.second, index);  // looks at seven bits of an index
#endif
  }
  // A table gives each byte's float32: 9 instructions for 64 values, where `widen` takes about 50.
  static void widen_group(const uint8_t* from, Vec (&group)[kGroup], const Held& held) {
    Bytes all = load_as<Bytes>(from);
    pin(all);
    const Bytes high = look_up(held.high, all) | (all & 0x80), low = look_up(held.low, all);
    const UIntVec first = bits<UIntVec>(first_in_turn(low, high));
    const UIntVec second = bits<UIntVec>(last_in_turn(low, high));
    group[0] = bits<Vec>(first << 16), group[1] = bits<Vec>(first & 0xffff0000u);
    group[2] = bits<Vec>(second << 16), group[3] = bits<Vec>(second & 0xffff0000u);
  }
  static void order(Vec (&group)[kGroup]) {
    DSJAX_EACH_PAIR(v, kGroup) unpack(group[v], group[v + 1]);
    // Vector v has columns 4v ... 4v + 3 of each 16: a transposition of four by four parts of four lanes.
    DSJAX_EACH_PAIR(v, kGroup) exchange<4>(group[v], group[v + 1]);
    DSJAX_EACH(v, 2) exchange<8>(group[v], group[v + 2]);
  }
#elif defined(DSJAX_QUICK_FLOAT8)
  typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
  typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));

  // Two vectors, of whose halves the first comes first.
  static void widen_both(Shorts both, Vec& first, Vec& second) {
    Halves half[2];
    std::memcpy(half, &both, sizeof(both));
    first = convert_halves(half[0]), second = convert_halves(half[1]);
  }
  typedef NoTables Held;
  static void widen_group(const uint8_t* from, Vec (&group)[kGroup], Held) {
    DSJAX_EACH_PAIR(v, kGroup) {
      typedef int8_t SignedBytes2 __attribute__((vector_size(2 * kLanes)));
      const SignedBytes2 all = load_as<SignedBytes2>(from + v * kLanes);
#if defined(__clang__)
      widen_both(as_halves(__builtin_convertvector(all, Shorts)), group[v], group[v + 1]);
#else
      // The compiler's conversion of two vectors takes three instructions.
      typedef char Chars __attribute__((vector_size(2 * kLanes)));
      widen_both(as_halves((Shorts)__builtin_ia32_pmovsxbw256((Chars)all)), group[v], group[v + 1]);
#endif
      group[v] *= 256.0f, group[v + 1] *= 256.0f;
    }
  }
  static void order(Vec (&)[kGroup]) {}

  // Twice the largest magnitude of the codes that were seen: of that which is no number, where a scale is beyond all numbers.
  struct Codes {
    Bytes most{};
    void note(float scale) {
      if (!(__builtin_fabsf(scale) <= 3.4028235e38f)) most = Bytes{} + 0xfe;
    }
    bool found() const {
      bool any = false;
      for (int i = 0; i < 4 * kLanes; i++) any |= most[i] == 0xfe;
      return any;
    }
  };
  // Each even byte, with its sign, seven bits higher.
  static Shorts even_bytes(Bytes all) {
#if defined(__clang__)
    return ((Shorts)all << 8) >> 1;
#else
    typedef char Chars __attribute__((vector_size(4 * kLanes)));
    return (Shorts)__builtin_ia32_pmaddubsw256((Chars)((Shorts{} + 128)), (Chars)all);  // one instruction, and elsewhere than shifts
#endif
  }
  // 2^-8 of the values: of the first sixteen columns the even ones and then the odd ones, and so of the second. A code that is no number
  // is taken for one, and is found in `codes`.
  static constexpr float kQuickUnit = 256;
  static void widen_quickly(const uint8_t* from, Vec (&group)[kGroup], Held, Codes& codes) {
    const Bytes all = load_as<Bytes>(from), twice = all + all;
    codes.most = twice > codes.most ? twice : codes.most;
    constexpr int16_t kept = static_cast<int16_t>(0xbf80);
    widen_both(even_bytes(all) & kept, group[0], group[2]);
    widen_both(((Shorts)all >> 1) & kept, group[1], group[3]);
  }
  static void order_quick(Vec (&group)[kGroup]) {
    DSJAX_EACH_PAIR(v, kGroup) interleave(group[v], group[v + 1]);
  }
#else
  static void widen_group(const uint8_t* from, Vec (&group)[kGroup], Held) {
    DSJAX_EACH(v, kGroup) group[v] = widen(from + v * kLanes);
  }
  static void order(Vec (&)[kGroup]) {}
#endif
};

// to[i] = factor * from[i], widened.
template <class Format>
inline void widen(const typename Format::Stored* from, long count, float factor, float* to) {
  long i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, Format::widen(from + i) * factor);
  for (; i < count; i++) to[i] = Format::widen_one(from[i]) * factor;
}

}  // namespace dsjax
