// twinpool._native: the kernels as Python objects. Addresses are integers (tensor.data_ptr()); the Python side keeps what they
// point to alive. The interpreter's lock is released while a kernel runs.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "attention.h"
#include "copy.h"
#include "elementwise.h"
#include "gdn.h"
#include "kda.h"
#include "linear.h"
#include "mamba1.h"
#include "mamba2.h"
#include "moe.h"
#include "pool.h"

namespace py = pybind11;
using namespace tp;

namespace {

using Address = uintptr_t;
using Int32s = py::array_t<int32_t, py::array::c_style>;
using Int64s = py::array_t<int64_t, py::array::c_style>;

template <class T = void>
T* at(Address a) { return reinterpret_cast<T*>(a); }

Dtype dtype_of(int code) {
    if (code < 0 || code > 2) throw py::value_error("dtype codes are 0 float32, 1 bfloat16, 2 float16");
    return Dtype(code);
}

// Keys and values have one type more.
Dtype kv_dtype_of(int code) { return code == int(Dtype::e4m3) ? Dtype::e4m3 : dtype_of(code); }

// Rows with the arrays they point into.
struct StepRows {
    Rows rows;
    py::object keep;
};

StepRows make_rows(const Int64s& positions, const Int32s& offsets, const Int32s& starts, const Int32s& ends, const Int32s& slots,
                   const Int32s& checkpoint_offsets, const Int32s& checkpoint_slots, const py::tuple& pages) {
    StepRows s;
    auto n = size_t(slots.size());
    if (size_t(offsets.size()) != n + 1 || size_t(starts.size()) != n || size_t(ends.size()) != n || pages.size() != n ||
        size_t(checkpoint_offsets.size()) != n || size_t(checkpoint_slots.size()) != n)
        throw py::value_error("the arrays of a step differ in their number of rows");
    s.rows.count = int(n);
    s.rows.tokens = int(positions.size());
    s.rows.positions = positions.data();
    s.rows.offsets = offsets.data();
    s.rows.starts = starts.data();
    s.rows.ends = ends.data();
    s.rows.slots = slots.data();
    s.rows.checkpoint_offsets = checkpoint_offsets.data();
    s.rows.checkpoint_slots = checkpoint_slots.data();
    for (auto table : pages) s.rows.pages.push_back(py::cast<Int32s>(table).data());
    s.keep = py::make_tuple(positions, offsets, starts, ends, slots, checkpoint_offsets, checkpoint_slots, pages);
    return s;
}

void bind_views(py::module_& m) {
    py::class_<StepRows>(m, "Rows").def(
        py::init(&make_rows), py::arg("positions").noconvert(), py::arg("row_offsets").noconvert(), py::arg("starts").noconvert(),
        py::arg("ends").noconvert(), py::arg("slots").noconvert(), py::arg("checkpoint_offsets").noconvert(),
        py::arg("checkpoint_slots").noconvert(), py::arg("pages"));
    py::class_<SlotView>(m, "SlotView").def(py::init([](Address base, int64_t stride_bytes, int dtype) {
                                                return SlotView{at<char>(base), stride_bytes, dtype_of(dtype)};
                                            }),
                                            py::arg("base"), py::arg("stride_bytes"), py::arg("dtype"));
    py::class_<KvView>(m, "KvView").def(
        py::init([](Address keys, Address values, int64_t page_stride_bytes, int page_size, int heads, int dim, int dtype) {
            return KvView{at<char>(keys), at<char>(values), page_stride_bytes, page_size, heads, dim, kv_dtype_of(dtype)};
        }),
        py::kw_only(), py::arg("keys"), py::arg("values"), py::arg("page_stride_bytes"), py::arg("page_size"), py::arg("heads"),
        py::arg("dim"), py::arg("dtype"));
}

void bind_linear(py::module_& m) {
    py::class_<Linear>(m, "Linear")
        .def(py::init([](Address weight, int64_t ldw, Address bias, int n, int k, int dtype) {
                 return std::make_unique<Linear>(at(weight), ldw, at(bias), n, k, dtype_of(dtype));
             }),
             py::kw_only(), py::arg("weight"), py::arg("ldw"), py::arg("bias"), py::arg("n"), py::arg("k"), py::arg("dtype"))
        .def_property_readonly("n", &Linear::n)
        .def_property_readonly("k", &Linear::k)
        .def_property_readonly("size_bytes", &Linear::bytes)
        .def(
            "run",
            [](const Linear& self, Address x, int64_t ldx, int rows, Address y, int64_t ldy, Address residual, bool wide) {
                py::gil_scoped_release release;
                self.run(at(x), ldx, rows, at(y), ldy, at(residual), wide);
            },
            py::arg("x"), py::arg("ldx"), py::arg("rows"), py::arg("y"), py::arg("ldy"), py::arg("residual") = 0,
            py::arg("wide") = false);
}

void bind_mixers(py::module_& m) {
    py::class_<Gdn>(m, "Gdn")
        .def(py::init([](int key_heads, int value_heads, int key_dim, int value_dim, int kernel, float eps, float beta_scale, int dtype,
                         Address conv_weight, Address rate, Address dt_bias, Address norm_weight) {
                 if (key_heads < 1 || value_heads % key_heads) throw py::value_error("value heads must be a multiple of key heads");
                 DeltaRule rule{key_heads, value_heads, key_dim, value_dim, dtype_of(dtype), at<float>(rate), at<float>(dt_bias),
                                beta_scale};
                 return Gdn{rule, kernel, eps, at<float>(conv_weight), at<float>(norm_weight)};
             }),
             py::kw_only(), py::arg("key_heads"), py::arg("value_heads"), py::arg("key_dim"), py::arg("value_dim"),
             py::arg("kernel"), py::arg("eps"), py::arg("beta_scale"), py::arg("dtype"), py::arg("conv_weight"), py::arg("rate"),
             py::arg("dt_bias"), py::arg("norm_weight"))
        .def("run", [](const Gdn& self, const StepRows& rows, const SlotView& conv, const SlotView& ssm, Address proj, int64_t ld,
                       Address out) {
            py::gil_scoped_release release;
            gdn(self, rows.rows, conv, ssm, at(proj), ld, at(out));
        });
    py::class_<Kda>(m, "Kda")
        .def(py::init([](int heads, int dim, int kernel, float eps, float lower_bound, int dtype, Address conv_weight, Address rate,
                         Address dt_bias, Address norm_weight) {
                 DeltaRule rule{heads, heads, dim, dim, dtype_of(dtype), at<float>(rate), at<float>(dt_bias), 1.0f, true, lower_bound};
                 return Kda{rule, kernel, eps, at<float>(conv_weight), at<float>(norm_weight)};
             }),
             py::kw_only(), py::arg("heads"), py::arg("dim"), py::arg("kernel"), py::arg("eps"), py::arg("lower_bound"),
             py::arg("dtype"), py::arg("conv_weight"), py::arg("rate"), py::arg("dt_bias"), py::arg("norm_weight"))
        .def(
            "run",
            [](const Kda& self, const StepRows& rows, const SlotView& conv, const SlotView& ssm, Address opened, int64_t ld,
               Address decay, int64_t ldd, Address gate, int64_t ldg, Address out) {
                py::gil_scoped_release release;
                kda(self, rows.rows, conv, ssm, {at(opened), ld, at(decay), ldd, at(gate), ldg}, at(out));
            },
            py::arg("rows"), py::arg("conv"), py::arg("ssm"), py::kw_only(), py::arg("opened"), py::arg("ld"), py::arg("decay"),
            py::arg("ldd"), py::arg("gate"), py::arg("ldg"), py::arg("out"));
    py::class_<Attention>(m, "Attention")
        .def(py::init([](int heads, int kv_heads, int dim, int rotary, float scale, float eps, int dtype, Address query_scale,
                         Address key_scale, Address table, bool gated) {
                 if (kv_heads < 1 || heads % kv_heads || rotary % 2) throw py::value_error("bad attention shape");
                 return Attention{heads, kv_heads, dim, rotary, scale, eps, dtype_of(dtype), at<float>(query_scale),
                                  at<float>(key_scale), at<float>(table), gated};
             }),
             py::kw_only(), py::arg("heads"), py::arg("kv_heads"), py::arg("dim"), py::arg("rotary"), py::arg("scale"),
             py::arg("eps"), py::arg("dtype"), py::arg("query_scale"), py::arg("key_scale"), py::arg("table"),
             py::arg("gated") = true)
        .def("rotate_and_store", [](const Attention& self, const StepRows& rows, const KvView& kv, Address proj, int64_t ld, Address q) {
            py::gil_scoped_release release;
            rotate_and_store(self, rows.rows, kv, at(proj), ld, at(q));
        })
        .def("attend", [](const Attention& self, const StepRows& rows, const KvView& kv, Address q, Address proj, int64_t ld,
                          Address out) {
            py::gil_scoped_release release;
            attend(self, rows.rows, kv, at(q), at(proj), ld, at(out));
        });
}

void bind_state_space(py::module_& m) {
    py::class_<Conv>(m, "Conv")
        .def(py::init([](int channels, int kernel, int dtype, Address weight, Address bias, bool silu) {
                 return Conv{channels, kernel, dtype_of(dtype), at<float>(weight), at<float>(bias), silu};
             }),
             py::kw_only(), py::arg("channels"), py::arg("kernel"), py::arg("dtype"), py::arg("weight"), py::arg("bias") = 0,
             py::arg("silu"))
        .def("run", [](const Conv& self, const StepRows& rows, const SlotView& window, Address x, int64_t ldx, Address y) {
            py::gil_scoped_release release;
            causal_conv(self, rows.rows, window, at(x), ldx, at(y));
        });
    py::class_<Mamba1>(m, "Mamba1")
        .def(py::init([](int channels, int state_size, int dtype, Address rate, Address dt_bias, Address skip) {
                 return Mamba1{channels, state_size, dtype_of(dtype), at<float>(rate), at<float>(dt_bias), at<float>(skip)};
             }),
             py::kw_only(), py::arg("channels"), py::arg("state_size"), py::arg("dtype"), py::arg("rate"), py::arg("dt_bias"),
             py::arg("skip"))
        .def("scan", [](const Mamba1& self, const StepRows& rows, const SlotView& ssm, const std::vector<std::pair<Address, int64_t>>& in,
                        Address y) {
            if (in.size() != 5) throw py::value_error("a scan takes x, dt, B, C and the gate");
            auto part = [&](size_t i) { return Columns{at(in[i].first), in[i].second}; };
            py::gil_scoped_release release;
            mamba1_scan(self, rows.rows, ssm, {part(0), part(1), part(2), part(3), part(4)}, at(y));
        });
    py::class_<Mamba2>(m, "Mamba2")
        .def(py::init([](int heads, int head_dim, int state_size, int groups, int dtype, Address rate, Address dt_bias, Address skip,
                         float dt_least, float dt_most) {
                 if (groups < 1 || heads % groups) throw py::value_error("heads must be a multiple of groups");
                 return Mamba2{heads, head_dim, state_size, groups, dtype_of(dtype), at<float>(rate), at<float>(dt_bias),
                               at<float>(skip), dt_least, dt_most};
             }),
             py::kw_only(), py::arg("heads"), py::arg("head_dim"), py::arg("state_size"), py::arg("groups"), py::arg("dtype"),
             py::arg("rate"), py::arg("dt_bias"), py::arg("skip"), py::arg("dt_least"), py::arg("dt_most"))
        .def("scan", [](const Mamba2& self, const StepRows& rows, const SlotView& ssm, Address mixed, Address dt, int64_t ldt,
                        Address y) {
            py::gil_scoped_release release;
            mamba2_scan(self, rows.rows, ssm, at(mixed), at(dt), ldt, at<float>(y));
        });
    m.def(
        "grouped_gated_norm",
        [](Address x, Address gate, int64_t ldg, Address y, int rows, int dim, int groups, Address weight, float eps,
           bool norm_first, int dtype) {
            py::gil_scoped_release release;
            grouped_gated_norm(at<float>(x), at(gate), ldg, at(y), rows, dim, groups, at<float>(weight), eps, norm_first,
                               dtype_of(dtype));
        },
        py::kw_only(), py::arg("x"), py::arg("gate"), py::arg("ldg"), py::arg("y"), py::arg("rows"), py::arg("dim"),
        py::arg("groups"), py::arg("weight"), py::arg("eps"), py::arg("norm_first"), py::arg("dtype"));
}

// Experts with the Python objects of their layers.
struct MoeLayer {
    Moe moe;
    py::object keep;
};

void bind_moe(py::module_& m) {
    py::class_<MoeLayer>(m, "Moe")
        .def(py::init([](const Linear& router, const std::vector<const Linear*>& gate_up, const std::vector<const Linear*>& down,
                         const Linear* shared_gate_up, const Linear* shared_down, const Linear* shared_gate, const Linear* narrow,
                         const Linear* widen, int top_k,
                         bool normalise, bool sigmoid, Address bias, int groups, int top_groups, float epsilon, float scale,
                         bool squared_relu, float limit) {
                 if (int(gate_up.size()) != router.n() || down.size() != gate_up.size() || top_k < 1 || top_k > router.n() ||
                     groups < 1 || router.n() % groups || top_groups < 1 || top_groups > groups)
                     throw py::value_error("bad mixture of experts");
                 Routing routing{top_k, sigmoid, at<float>(bias), groups, top_groups, normalise, epsilon, scale};
                 return MoeLayer{{&router, gate_up, down, shared_gate_up, shared_down, shared_gate, narrow, widen, routing, squared_relu, limit},
                                 py::none()};
             }),
             py::kw_only(), py::arg("router"), py::arg("gate_up"), py::arg("down"), py::arg("shared_gate_up"),
             py::arg("shared_down"), py::arg("shared_gate"), py::arg("narrow"), py::arg("widen"), py::arg("top_k"), py::arg("normalise"), py::arg("sigmoid") = false,
             py::arg("bias") = 0, py::arg("groups") = 1, py::arg("top_groups") = 1, py::arg("epsilon") = 0.0f,
             py::arg("scale") = 1.0f, py::arg("squared_relu") = false, py::arg("limit") = INFINITY)
        .def_readwrite("keep", &MoeLayer::keep)
        .def("run", [](const MoeLayer& self, Address x, int rows, Address y, Address residual) {
            py::gil_scoped_release release;
            moe(self.moe, at(x), rows, at(y), at(residual));
        });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Kernels of the adopted models.";
    m.def("set_threads", &set_threads, py::arg("n"), "Threads that share a kernel's work, the caller included.");
    m.def("threads", &threads, "Threads in use.");
    bind_views(m);
    bind_linear(m);
    bind_mixers(m);
    bind_state_space(m);
    bind_moe(m);
    m.def("copy_rows", [](Address dst, int64_t dst_stride_bytes, const Int32s& dst_ids, Address src, int64_t src_stride_bytes,
                          const Int32s& src_ids, int64_t n_bytes) {
        if (dst_ids.size() != src_ids.size()) throw py::value_error("as many rows to copy to as to copy from");
        RowsOf to{at<char>(dst), dst_stride_bytes, dst_ids.data()}, from{at<char>(src), src_stride_bytes, src_ids.data()};
        int64_t n = dst_ids.size();
        py::gil_scoped_release release;
        copy_rows(to, from, n, n_bytes);
    });
    m.def("rms_norm", [](Address x, int64_t ldx, Address y, int64_t ldy, int rows, int dim, Address scale, float eps, int dtype) {
        py::gil_scoped_release release;
        rms_norm(at(x), ldx, at(y), ldy, rows, dim, at<float>(scale), eps, dtype_of(dtype));
    });
    m.def("squared_relu", [](Address x, int64_t ldx, Address y, int64_t ldy, int rows, int dim, int dtype) {
        py::gil_scoped_release release;
        squared_relu(at(x), ldx, at(y), ldy, rows, dim, dtype_of(dtype));
    });
    m.def("silu_mul", [](Address x, int64_t ldx, Address y, int64_t ldy, int rows, int dim, float limit, int dtype) {
        py::gil_scoped_release release;
        silu_mul(at(x), ldx, at(y), ldy, rows, dim, limit, dtype_of(dtype));
    });
}
