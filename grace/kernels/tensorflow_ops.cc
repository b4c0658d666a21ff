// The kernels as TensorFlow operations for CPUs. out reuses the memory of x or residual if nothing else needs it.
//
// Operations check the sizes of x and residual, so that a wrong graph fails with an error. They also check the sizes of
// payloads, which come from the network.
#include <dlfcn.h>

#include <vector>

#include "api.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/denormal.h"

namespace {

using namespace tensorflow;
using shape_inference::DimensionHandle;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

#define FUNCTIONS(each) \
  each(efsignsgd_encode) each(efsignsgd_mean) each(blockint_encode) each(blockint_mean) each(topk_encode) \
  each(sparse_mean) each(eden_encode) each(eden_mean) each(noise_table)
#define POINTER(name) decltype(&grace_##name) name = nullptr;
struct {
  const grace::Loops* loops = nullptr;
  FUNCTIONS(POINTER)
} kernels;

int64_t blocks(int64_t n, int64_t block) { return n == 0 ? 0 : block <= 0 ? 1 : (n + block - 1) / block; }

// Sets the shapes of the outputs bytes, scales and out, for a vector x.
Status encoded(InferenceContext* c, int64_t bits) {
  ShapeHandle x, residual;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &x));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &residual));
  int64_t block;
  TF_RETURN_IF_ERROR(c->GetAttr("block", &block));
  const DimensionHandle n = c->Dim(x, 0);
  if (c->ValueKnown(n)) {
    const int64_t size = c->Value(n);
    c->set_output(0, c->Vector((size * bits + 7) / 8));
    c->set_output(1, c->Vector(blocks(size, block)));
  } else {
    c->set_output(0, c->Vector(c->UnknownDim()));
    c->set_output(1, c->Vector(c->UnknownDim()));
  }
  c->set_output(2, c->Vector(n));
  return OkStatus();
}

Status mean_of(InferenceContext* c) {
  int64_t n;
  TF_RETURN_IF_ERROR(c->GetAttr("n", &n));
  c->set_output(0, c->Vector(n));
  return OkStatus();
}

Status blockint_shape(InferenceContext* c) {
  int64_t bits;
  TF_RETURN_IF_ERROR(c->GetAttr("bits", &bits));
  return encoded(c, bits);
}

Status topk_shape(InferenceContext* c) {
  int64_t k;
  ShapeHandle x;
  TF_RETURN_IF_ERROR(c->GetAttr("k", &k));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &x));
  c->set_output(0, c->Vector(k));
  c->set_output(1, c->Vector(k));
  c->set_output(2, x);
  return OkStatus();
}

// Returns the number of bits per code: 1 .. 4 for 2^bits levels, 0 for any other number of levels.
int64_t bits_of(const std::vector<float>& levels) {
  for (int64_t bits = 1; bits <= 4; bits++)
    if (levels.size() == size_t(1) << bits) return bits;
  return 0;
}

Status eden_shape(InferenceContext* c) {
  ShapeHandle x, residual;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &x));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &residual));
  for (int scalar = 2; scalar < 5; scalar++) TF_RETURN_IF_ERROR(c->WithRank(c->input(scalar), 0, &residual));
  int64_t width;
  std::vector<float> levels;
  TF_RETURN_IF_ERROR(c->GetAttr("width", &width));
  TF_RETURN_IF_ERROR(c->GetAttr("levels", &levels));
  const DimensionHandle n = c->Dim(x, 0);
  const bool known = c->ValueKnown(n);
  const int64_t count = known ? blocks(c->Value(n), width) : 0;
  c->set_output(0, c->Vector(known ? c->MakeDim((count * width * bits_of(levels) + 7) / 8) : c->UnknownDim()));
  for (int each = 1; each < 3; each++) c->set_output(each, c->Vector(known ? c->MakeDim(count) : c->UnknownDim()));
  c->set_output(3, c->Vector(n));
  return OkStatus();
}

REGISTER_OP("GraceEfsignsgdEncode")
    .Input("x: float")
    .Input("residual: float")
    .Output("bits: uint8")
    .Output("scales: float")
    .Output("out: float")
    .Attr("block: int >= 0")
    .Attr("threads: int >= 1 = 1")
    .SetShapeFn([](InferenceContext* c) { return encoded(c, 1); });

REGISTER_OP("GraceEfsignsgdMean")
    .Input("bits: N * uint8")
    .Input("scales: N * float")
    .Output("out: float")
    .Attr("N: int >= 1")
    .Attr("n: int >= 0")
    .Attr("block: int >= 0")
    .Attr("threads: int >= 1 = 1")
    .SetShapeFn(mean_of);

REGISTER_OP("GraceBlockintEncode")
    .Input("x: float")
    .Input("residual: float")
    .Input("table: uint16")
    .Input("offsets: uint16")
    .Output("codes: uint8")
    .Output("scales: float")
    .Output("out: float")
    .Attr("block: int >= 0")
    .Attr("bits: int")
    .Attr("stochastic: bool")
    .Attr("start: int >= 0 = 0")
    .Attr("threads: int >= 1 = 1")
    .SetShapeFn(blockint_shape);

REGISTER_OP("GraceBlockintMean")
    .Input("codes: N * uint8")
    .Input("scales: N * float")
    .Output("out: float")
    .Attr("N: int >= 1")
    .Attr("n: int >= 0")
    .Attr("block: int >= 0")
    .Attr("bits: int")
    .Attr("threads: int >= 1 = 1")
    .SetShapeFn(mean_of);

REGISTER_OP("GraceTopkEncode")
    .Input("x: float")
    .Input("residual: float")
    .Output("values: float")
    .Output("positions: int32")
    .Output("out: float")
    .Attr("k: int >= 0")
    .Attr("threads: int >= 1 = 1")
    .SetShapeFn(topk_shape);

REGISTER_OP("GraceSparseMean")
    .Input("values: N * float")
    .Input("positions: N * int32")
    .Output("out: float")
    .Attr("N: int >= 1")
    .Attr("n: int >= 0")
    .Attr("threads: int >= 1 = 1")
    .SetShapeFn(mean_of);

REGISTER_OP("GraceEdenEncode")
    .Input("x: float")
    .Input("residual: float")
    .Input("stream: int64")
    .Input("key0: int64")
    .Input("key1: int64")
    .Output("codes: uint8")
    .Output("scales: float")
    .Output("streams: uint8")
    .Output("out: float")
    .Attr("width: int >= 8")
    .Attr("levels: list(float) >= 2")
    .Attr("middles: list(float) >= 1")
    .Attr("divisor: float")
    .Attr("start: int >= 0 = 0")
    .Attr("threads: int >= 1 = 1")
    .SetShapeFn(eden_shape);

REGISTER_OP("GraceEdenMean")
    .Input("codes: N * uint8")
    .Input("scales: N * float")
    .Input("streams: N * uint8")
    .Input("key0: int64")
    .Input("key1: int64")
    .Output("out: float")
    .Attr("N: int >= 1")
    .Attr("n: int >= 0")
    .Attr("width: int >= 8")
    .Attr("levels: list(float) >= 2")
    .Attr("start: int >= 0 = 0")
    .Attr("threads: int >= 1 = 1")
    .SetShapeFn(mean_of);

REGISTER_OP("GraceKeys")
    .Input("step: int64")
    .Input("worker: int64")
    .Output("key0: int64")
    .Output("key1: int64")
    .Attr("stem: int")
    .SetShapeFn([](InferenceContext* c) {
      for (int key = 0; key < 2; key++) c->set_output(key, c->Scalar());
      return OkStatus();
    });

REGISTER_OP("GraceNoiseTable")
    .Input("key0: int64")
    .Input("key1: int64")
    .Output("table: uint16")
    .Attr("n: int >= 0")
    .SetShapeFn(mean_of);

template <class T>
const T* data(const Tensor& x) {
  return x.NumElements() ? x.flat<T>().data() : nullptr;
}

class GraceOp : public OpKernel {
 public:
  explicit GraceOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("threads", &threads_));
    if (c->HasAttr("block")) OP_REQUIRES_OK(c, c->GetAttr("block", &block_));
    OP_REQUIRES(c, block_ % 8 == 0, errors::InvalidArgument("block=", block_, " must be a multiple of 8"));
    if (c->HasAttr("n")) OP_REQUIRES_OK(c, c->GetAttr("n", &n_));
    if (c->HasAttr("k")) OP_REQUIRES_OK(c, c->GetAttr("k", &k_));
    if (!c->HasAttr("bits")) return;
    OP_REQUIRES_OK(c, c->GetAttr("bits", &bits_));
    OP_REQUIRES(c, bits_ == 8 || bits_ == 4 || bits_ == 2, errors::InvalidArgument("bits=", bits_));
  }

  void Compute(OpKernelContext* c) override {
    OP_REQUIRES(c, kernels.loops, errors::FailedPrecondition("grace.kernels.tensorflow has not been loaded"));
    // TensorFlow's threads may flush subnormal numbers to zero, which would change results.
    const port::ScopedDontFlushDenormal subnormals_count;
    Run(c);
  }

 protected:
  virtual void Run(OpKernelContext* c) = 0;

  // Checks x and the residual, which may be empty. Returns the memory of output `index`, which may be that of an input;
  // null after an error.
  float* Open(OpKernelContext* c, int index) {
    const Tensor &x = c->input(0), &residual = c->input(1);
    const auto refuse = [c](const char* why) -> float* {
      c->SetStatus(errors::InvalidArgument(why));
      return nullptr;
    };
    if (!TensorShapeUtils::IsVector(x.shape())) return refuse("x must be a vector");
    if (residual.NumElements() != 0 && residual.NumElements() != x.NumElements())
      return refuse("the residual must be empty or as long as x");
    Tensor* out = nullptr;
    const Status status = c->forward_input_or_allocate_output({0, 1}, index, x.shape(), &out);
    if (!status.ok()) {
      c->SetStatus(status);
      return nullptr;
    }
    return out->flat<float>().data();
  }

  int64_t threads_ = 1, block_ = 0, n_ = 0, k_ = 0, bits_ = 1;
};

template <bool BLOCKINT>
class Encode : public GraceOp {
 public:
  explicit Encode(OpKernelConstruction* c) : GraceOp(c) {
    if (!BLOCKINT) return;
    OP_REQUIRES_OK(c, c->GetAttr("stochastic", &stochastic_));
    OP_REQUIRES_OK(c, c->GetAttr("start", &start_));
  }

 protected:
  void Run(OpKernelContext* c) override {
    float* out = Open(c, 2);
    if (!c->status().ok()) return;
    const int64_t n = c->input(0).NumElements();
    Tensor *bytes = nullptr, *scales = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({(n * bits_ + 7) / 8}), &bytes));
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({blocks(n, block_)}), &scales));
    const float *x = data<float>(c->input(0)), *residual = data<float>(c->input(1));
    uint8_t* packed = bytes->flat<uint8>().data();
    float* scale = scales->flat<float>().data();
    if constexpr (BLOCKINT) {
      const uint16_t *table = nullptr, *offsets = nullptr;
      if (stochastic_ && n) {
        const int64_t segments = (start_ + n - 1) / 65536 - start_ / 65536 + 1;
        OP_REQUIRES(c, c->input(2).NumElements() == 65536 && c->input(3).NumElements() >= segments,
                    errors::InvalidArgument("stochastic rounding needs a table of 65536 and ", segments, " offsets"));
        table = data<uint16>(c->input(2)), offsets = data<uint16>(c->input(3));
      }
      kernels.blockint_encode(kernels.loops, x, residual, out, packed, scale, n, block_, bits_, table, offsets, start_,
                              threads_, 0);
    } else {
      kernels.efsignsgd_encode(kernels.loops, x, residual, out, packed, scale, n, block_, threads_, 0);
    }
  }

 private:
  bool stochastic_ = false;
  int64_t start_ = 0;
};

template <bool BLOCKINT>
class Mean : public GraceOp {
 public:
  using GraceOp::GraceOp;

 protected:
  void Run(OpKernelContext* c) override {
    OpInputList bytes, scales;
    OP_REQUIRES_OK(c, c->input_list(BLOCKINT ? "codes" : "bits", &bytes));
    OP_REQUIRES_OK(c, c->input_list("scales", &scales));
    std::vector<const uint8_t*> packed;
    std::vector<const float*> scale;
    for (int w = 0; w < bytes.size(); w++) {
      OP_REQUIRES(c, bytes[w].NumElements() == (n_ * bits_ + 7) / 8 && scales[w].NumElements() == blocks(n_, block_),
                  errors::InvalidArgument("worker ", w, " sent a payload of another size"));
      packed.push_back(data<uint8>(bytes[w]));
      scale.push_back(data<float>(scales[w]));
    }
    Tensor* out = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({n_}), &out));
    float* mean = out->flat<float>().data();
    const int64_t workers = bytes.size();
    if constexpr (BLOCKINT)
      kernels.blockint_mean(kernels.loops, packed.data(), scale.data(), workers, mean, n_, block_, bits_, threads_);
    else
      kernels.efsignsgd_mean(kernels.loops, packed.data(), scale.data(), workers, mean, n_, block_, threads_);
  }
};

class TopkEncode : public GraceOp {
 public:
  using GraceOp::GraceOp;

 protected:
  void Run(OpKernelContext* c) override {
    const int64_t n = c->input(0).NumElements();
    OP_REQUIRES(c, k_ <= n, errors::InvalidArgument("k=", k_, " of ", n, " elements"));
    float* out = Open(c, 2);
    if (!c->status().ok()) return;
    Tensor *values = nullptr, *positions = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({k_}), &values));
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({k_}), &positions));
    OP_REQUIRES(c,
                !kernels.topk_encode(kernels.loops, data<float>(c->input(0)), data<float>(c->input(1)), out,
                                     values->flat<float>().data(), positions->flat<int32>().data(), n, k_,
                                     threads_, 0),
                errors::ResourceExhausted("top-k needs memory for about 2 k elements"));
  }
};

class SparseMean : public GraceOp {
 public:
  using GraceOp::GraceOp;

 protected:
  void Run(OpKernelContext* c) override {
    OpInputList values, positions;
    OP_REQUIRES_OK(c, c->input_list("values", &values));
    OP_REQUIRES_OK(c, c->input_list("positions", &positions));
    std::vector<const float*> numbers;
    std::vector<const int32_t*> places;
    std::vector<int64_t> counts;
    for (int w = 0; w < values.size(); w++) {
      OP_REQUIRES(c, values[w].NumElements() == positions[w].NumElements(),
                  errors::InvalidArgument("worker ", w, " sent more values than positions, or fewer"));
      numbers.push_back(data<float>(values[w]));
      places.push_back(data<int32>(positions[w]));
      counts.push_back(values[w].NumElements());
    }
    Tensor* out = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({n_}), &out));
    const int64_t wrong = kernels.sparse_mean(kernels.loops, numbers.data(), places.data(), counts.data(),
                                              values.size(), out->flat<float>().data(), n_, threads_);
    OP_REQUIRES(c, wrong != -2, errors::ResourceExhausted("no memory to add up sparse vectors"));
    OP_REQUIRES(c, wrong < 0,
                errors::InvalidArgument("worker ", wrong, " sent positions that do not ascend within 0 .. ", n_ - 1));
  }
};

// Reads the attributes that all operations on rotated blocks have.
class Rotated : public GraceOp {
 public:
  explicit Rotated(OpKernelConstruction* c) : GraceOp(c) {
    OP_REQUIRES_OK(c, c->GetAttr("width", &width_));
    OP_REQUIRES_OK(c, c->GetAttr("levels", &levels_));
    OP_REQUIRES_OK(c, c->GetAttr("start", &start_));
    bits_ = bits_of(levels_);
    OP_REQUIRES(c, bits_, errors::InvalidArgument(levels_.size(), " levels: their number must be 2, 4, 8 or 16"));
    OP_REQUIRES(c, (width_ & (width_ - 1)) == 0, errors::InvalidArgument("width=", width_, " is no power of two"));
  }

 protected:
  int64_t bytes(int64_t n) const { return (blocks(n, width_) * width_ * bits_ + 7) / 8; }

  int64_t width_ = 0, start_ = 0;
  std::vector<float> levels_;
};

class EdenEncode : public Rotated {
 public:
  explicit EdenEncode(OpKernelConstruction* c) : Rotated(c) {
    OP_REQUIRES_OK(c, c->GetAttr("middles", &middles_));
    OP_REQUIRES_OK(c, c->GetAttr("divisor", &divisor_));
    OP_REQUIRES(c, middles_.size() + 1 == levels_.size(), errors::InvalidArgument("levels and middles do not match"));
  }

 protected:
  void Run(OpKernelContext* c) override {
    float* out = Open(c, 3);
    if (!c->status().ok()) return;
    const int64_t n = c->input(0).NumElements(), count = blocks(n, width_);
    Tensor *codes = nullptr, *scales = nullptr, *streams = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({bytes(n)}), &codes));
    OP_REQUIRES_OK(c, c->allocate_output(1, TensorShape({count}), &scales));
    OP_REQUIRES_OK(c, c->allocate_output(2, TensorShape({count}), &streams));
    const auto scalar = [c](int index) { return c->input(index).scalar<int64_t>()(); };
    const float* residual = data<float>(c->input(1));
    kernels.eden_encode(kernels.loops, data<float>(c->input(0)), residual, residual ? out : nullptr,
                        codes->flat<uint8>().data(), scales->flat<float>().data(), streams->flat<uint8>().data(), n,
                        width_, bits_, levels_.data(), middles_.data(), divisor_, scalar(2), scalar(3), scalar(4),
                        start_, threads_, 0);
  }

 private:
  std::vector<float> middles_;
  float divisor_ = 0;
};

class EdenMean : public Rotated {
 public:
  using Rotated::Rotated;

 protected:
  void Run(OpKernelContext* c) override {
    OpInputList codes, scales, streams;
    const Tensor *key0 = nullptr, *key1 = nullptr;
    OP_REQUIRES_OK(c, c->input_list("codes", &codes));
    OP_REQUIRES_OK(c, c->input_list("scales", &scales));
    OP_REQUIRES_OK(c, c->input_list("streams", &streams));
    OP_REQUIRES_OK(c, c->input("key0", &key0));
    OP_REQUIRES_OK(c, c->input("key1", &key1));
    std::vector<const uint8_t*> packed, signs;
    std::vector<const float*> scale;
    const int64_t count = blocks(n_, width_);
    for (int w = 0; w < codes.size(); w++) {
      OP_REQUIRES(c,
                  codes[w].NumElements() == bytes(n_) && scales[w].NumElements() == count &&
                      streams[w].NumElements() == count,
                  errors::InvalidArgument("worker ", w, " sent a payload of another size"));
      packed.push_back(data<uint8>(codes[w]));
      scale.push_back(data<float>(scales[w]));
      signs.push_back(data<uint8>(streams[w]));
    }
    Tensor* out = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({n_}), &out));
    kernels.eden_mean(kernels.loops, packed.data(), scale.data(), signs.data(), codes.size(),
                      out->flat<float>().data(), n_, width_, bits_, levels_.data(), key0->scalar<int64_t>()(),
                      key1->scalar<int64_t>()(), start_, threads_);
  }
};

// The two keys of a random stream: grace.core.rng.keys.
class Keys : public OpKernel {
 public:
  explicit Keys(OpKernelConstruction* c) : OpKernel(c) {
    int64_t stem;
    OP_REQUIRES_OK(c, c->GetAttr("stem", &stem));
    stem_ = uint32_t(stem);
  }

  void Compute(OpKernelContext* c) override {
    uint32_t hash = stem_;
    for (int input = 0; input < 2; input++) {
      OP_REQUIRES(c, TensorShapeUtils::IsScalar(c->input(input).shape()), errors::InvalidArgument("not a scalar"));
      hash = Mix(hash + Mix(uint32_t(c->input(input).scalar<int64_t>()())));
    }
    for (uint32_t key = 0; key < 2; key++) {
      Tensor* out = nullptr;
      OP_REQUIRES_OK(c, c->allocate_output(int(key), TensorShape({}), &out));
      out->scalar<int64_t>()() = Mix(hash + Mix(key + 1));
    }
  }

 private:
  static uint32_t Mix(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6B;
    h = (h ^ (h >> 13)) * 0xC2B2AE35;
    return h ^ (h >> 16);
  }

  uint32_t stem_ = 0;
};

class NoiseTable : public OpKernel {
 public:
  explicit NoiseTable(OpKernelConstruction* c) : OpKernel(c) { OP_REQUIRES_OK(c, c->GetAttr("n", &n_)); }

  void Compute(OpKernelContext* c) override {
    Tensor* out = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({n_}), &out));
    kernels.noise_table(kernels.loops, c->input(0).scalar<int64_t>()(), c->input(1).scalar<int64_t>()(), n_,
                        out->flat<uint16>().data());
  }

 private:
  int64_t n_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("GraceEfsignsgdEncode").Device(DEVICE_CPU), Encode<false>);
REGISTER_KERNEL_BUILDER(Name("GraceEfsignsgdMean").Device(DEVICE_CPU), Mean<false>);
REGISTER_KERNEL_BUILDER(Name("GraceBlockintEncode").Device(DEVICE_CPU), Encode<true>);
REGISTER_KERNEL_BUILDER(Name("GraceBlockintMean").Device(DEVICE_CPU), Mean<true>);
REGISTER_KERNEL_BUILDER(Name("GraceTopkEncode").Device(DEVICE_CPU), TopkEncode);
REGISTER_KERNEL_BUILDER(Name("GraceSparseMean").Device(DEVICE_CPU), SparseMean);
REGISTER_KERNEL_BUILDER(Name("GraceEdenEncode").Device(DEVICE_CPU), EdenEncode);
REGISTER_KERNEL_BUILDER(Name("GraceEdenMean").Device(DEVICE_CPU), EdenMean);
REGISTER_KERNEL_BUILDER(Name("GraceKeys").Device(DEVICE_CPU), Keys);
REGISTER_KERNEL_BUILDER(Name("GraceNoiseTable").Device(DEVICE_CPU), NoiseTable);

}  // namespace

// Sets the kernel library and the instruction set. Returns 0, or 1 if the library cannot be loaded or lacks a kernel.
extern "C" __attribute__((visibility("default"))) int grace_tensorflow_use(const char* path, const void* loops) {
  void* library = dlopen(path, RTLD_NOW);
  if (!library) return 1;
#define FIND(name)                                                                       \
  kernels.name = reinterpret_cast<decltype(kernels.name)>(dlsym(library, "grace_" #name)); \
  if (!kernels.name) return 1;
  FUNCTIONS(FIND)
  kernels.loops = static_cast<const grace::Loops*>(loops);
  return 0;
}
