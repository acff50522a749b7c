// One layer's mixture of experts on ggml's CPU backend, built the way llama.cpp builds it, for
// comparison: several layers of the same experts at different addresses.
//
//   ggml_moe CASE TYPE HIDDEN INTERMEDIATE EXPERTS TOP_K DISTINCT LAYERS THREADS REPACK
//
// CASE holds gate.ggml, up.ggml and down.ggml: DISTINCT experts each, in blocks of ggml type number
// TYPE; expert e is number e % DISTINCT. Then each line on standard input is answered by a line of
// JSON:
//   run TOKENS CALLS IDS       IDS: int32 [CALLS, LAYERS, TOKENS, TOP_K] -> seconds of each call
//   check TOKENS X IDS W OUT   float32 [TOKENS, HIDDEN], ids and weights [TOKENS, TOP_K]; layer 0
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

struct Shape {
  ggml_type type;
  int64_t hidden, intermediate, experts, top_k, distinct, layers;
};

struct Layer {
  ggml_tensor *gate, *up, *down;
};

std::vector<uint8_t> read_file(const std::string& path, size_t bytes) {
  std::ifstream file(path, std::ios::binary);
  std::vector<uint8_t> data(bytes);
  file.read(reinterpret_cast<char*>(data.data()), std::streamsize(bytes));
  if (size_t(file.gcount()) != bytes) throw std::runtime_error(path + " is too short");
  return data;
}

// Whether the backend multiplies with chosen matrices of this type from this kind of buffer; asked
// in the way llama.cpp asks before it puts weights there.
bool usable(ggml_backend_dev_t device, ggml_backend_buffer_type_t buffers, const Shape& shape) {
  ggml_context* context = ggml_init({8 * ggml_tensor_overhead(), nullptr, true});
  ggml_backend_buffer_t none = ggml_backend_buft_alloc_buffer(buffers, 0);
  bool fits = true;
  for (const auto& [cols, rows] :
       {std::pair{shape.hidden, shape.intermediate}, std::pair{shape.intermediate, shape.hidden}}) {
    ggml_tensor* weight = ggml_new_tensor_3d(context, shape.type, cols, rows, shape.experts);
    ggml_tensor* x = ggml_new_tensor_3d(context, GGML_TYPE_F32, cols, shape.top_k, 512);
    ggml_tensor* ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, shape.top_k, 512);
    weight->buffer = none;
    fits = fits && ggml_backend_dev_supports_op(device, ggml_mul_mat_id(context, weight, x, ids));
  }
  ggml_backend_buffer_free(none);
  ggml_free(context);
  return fits;
}

// The buffer type that rearranges weights for the CPU, which llama.cpp prefers where it is usable.
ggml_backend_buffer_type_t buffer_type(ggml_backend_t backend, const Shape& shape, bool repack) {
  ggml_backend_dev_t device = ggml_backend_get_device(backend);
  if (repack) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t* type = extra ? extra(device) : nullptr; type && *type; ++type)
      if (usable(device, *type, shape)) return *type;
  }
  return ggml_backend_cpu_buffer_type();
}

// Weights, backend and the operator's graph for the number of tokens asked last.
class Operator {
 public:
  Operator(const std::string& folder, Shape shape, int threads, bool repack) : shape_(shape) {
    backend_ = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend_, threads);
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    ggml_backend_cpu_set_threadpool(backend_, ggml_threadpool_new(&params));
    load(folder, buffer_type(backend_, shape, repack));
  }

  const char* buffer_name() const { return ggml_backend_buffer_name(weights_); }

  std::vector<double> run(int64_t tokens, int64_t calls, const std::string& ids_path) {
    prepare(tokens, shape_.layers);
    const size_t layer_bytes = size_t(tokens * shape_.top_k) * sizeof(int32_t);
    const auto ids = read_file(ids_path, layer_bytes * size_t(shape_.layers * calls));
    std::vector<float> x(size_t(tokens * shape_.hidden));
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(int(i * 7919 % 2001) - 1000) / 577.f;
    const std::vector<float> w(size_t(tokens * shape_.top_k), 1.f / float(shape_.top_k));
    std::vector<double> seconds;
    for (int64_t call = 0; call < calls; ++call) {
      ggml_backend_tensor_set(x_, x.data(), 0, x.size() * sizeof(float));
      ggml_backend_tensor_set(w_, w.data(), 0, w.size() * sizeof(float));
      for (int64_t l = 0; l < shape_.layers; ++l)
        ggml_backend_tensor_set(ids_[size_t(l)],
                                ids.data() + layer_bytes * size_t(call * shape_.layers + l), 0,
                                layer_bytes);
      const auto start = std::chrono::steady_clock::now();
      ggml_backend_graph_compute(backend_, graph_);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      seconds.push_back(took.count());
    }
    return seconds;
  }

  void check(int64_t tokens, const std::string& x, const std::string& ids, const std::string& w,
             const std::string& out) {
    prepare(tokens, 1);
    set_from(x_, x);
    set_from(ids_[0], ids);
    set_from(w_, w);
    ggml_backend_graph_compute(backend_, graph_);
    std::vector<char> result(ggml_nbytes(out_));
    ggml_backend_tensor_get(out_, result.data(), 0, result.size());
    std::ofstream(out, std::ios::binary).write(result.data(), std::streamsize(result.size()));
  }

 private:
  void load(const std::string& folder, ggml_backend_buffer_type_t type) {
    ggml_context* context =
        ggml_init({ggml_tensor_overhead() * size_t(3 * shape_.layers + 1), nullptr, true});
    for (int64_t l = 0; l < shape_.layers; ++l) {
      auto matrices = [&](int64_t cols, int64_t rows) {
        return ggml_new_tensor_3d(context, shape_.type, cols, rows, shape_.experts);
      };
      layers_.push_back({matrices(shape_.hidden, shape_.intermediate),
                         matrices(shape_.hidden, shape_.intermediate),
                         matrices(shape_.intermediate, shape_.hidden)});
    }
    weights_ = ggml_backend_alloc_ctx_tensors_from_buft(context, type);
    if (!weights_) throw std::runtime_error("no memory for the weights");
    ggml_backend_buffer_set_usage(weights_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    fill(&Layer::gate, folder + "/gate.ggml");
    fill(&Layer::up, folder + "/up.ggml");
    fill(&Layer::down, folder + "/down.ggml");
  }

  void fill(ggml_tensor* Layer::* member, const std::string& path) {
    const size_t bytes = ggml_nbytes(layers_[0].*member) / size_t(shape_.experts);
    const auto distinct = read_file(path, bytes * size_t(shape_.distinct));
    std::vector<uint8_t> all(bytes * size_t(shape_.experts));
    for (int64_t e = 0; e < shape_.experts; ++e)
      std::memcpy(all.data() + bytes * size_t(e),
                  distinct.data() + bytes * size_t(e % shape_.distinct), bytes);
    for (Layer& layer : layers_) ggml_backend_tensor_set(layer.*member, all.data(), 0, all.size());
  }

  void set_from(ggml_tensor* tensor, const std::string& path) {
    const auto data = read_file(path, ggml_nbytes(tensor));
    ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
  }

  // The graph of ``layers`` operators, each fed by the one before.
  void prepare(int64_t tokens, int64_t layers) {
    if (graph_ && tokens == tokens_ && layers == int64_t(ids_.size())) return;
    if (allocator_) ggml_gallocr_free(allocator_);
    if (context_) ggml_free(context_);
    context_ = ggml_init(
        {ggml_tensor_overhead() * size_t(64 * layers + 64) + ggml_graph_overhead(), nullptr, true});
    tokens_ = tokens;
    ids_.clear();
    x_ = ggml_new_tensor_2d(context_, GGML_TYPE_F32, shape_.hidden, tokens);
    w_ = ggml_new_tensor_3d(context_, GGML_TYPE_F32, 1, shape_.top_k, tokens);
    ggml_set_input(x_);
    ggml_set_input(w_);
    out_ = x_;
    for (int64_t l = 0; l < layers; ++l) out_ = add_layer(layers_[size_t(l)], out_);
    ggml_set_output(out_);
    graph_ = ggml_new_graph(context_);
    ggml_build_forward_expand(graph_, out_);
    allocator_ = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    ggml_gallocr_alloc_graph(allocator_, graph_);
  }

  ggml_tensor* add_layer(const Layer& layer, ggml_tensor* input) {
    ggml_tensor* ids = ggml_new_tensor_2d(context_, GGML_TYPE_I32, shape_.top_k, tokens_);
    ggml_set_input(ids);
    ids_.push_back(ids);
    ggml_tensor* x = ggml_reshape_3d(context_, input, shape_.hidden, 1, tokens_);
    ggml_tensor* up = ggml_mul_mat_id(context_, layer.up, x, ids);
    ggml_tensor* gate = ggml_mul_mat_id(context_, layer.gate, x, ids);
    ggml_tensor* h = ggml_swiglu_split(context_, gate, up);
    ggml_tensor* y = ggml_mul(context_, ggml_mul_mat_id(context_, layer.down, h, ids), w_);
    ggml_tensor* sum = nullptr;
    for (int64_t k = 0; k < shape_.top_k; ++k) {
      ggml_tensor* part =
          ggml_view_2d(context_, y, shape_.hidden, tokens_, y->nb[2], size_t(k) * y->nb[1]);
      sum = sum ? ggml_add(context_, sum, part) : part;
    }
    return sum;
  }

  Shape shape_;
  ggml_backend_t backend_ = nullptr;
  ggml_backend_buffer_t weights_ = nullptr;
  std::vector<Layer> layers_;
  ggml_context* context_ = nullptr;
  ggml_gallocr_t allocator_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  int64_t tokens_ = 0;
  ggml_tensor *x_ = nullptr, *w_ = nullptr, *out_ = nullptr;
  std::vector<ggml_tensor*> ids_;
};

std::string answer(Operator& op, const std::string& line) {
  std::istringstream words(line);
  std::string what;
  int64_t tokens = 0;
  words >> what >> tokens;
  std::ostringstream reply;
  reply.precision(9);
  if (what == "run") {
    int64_t calls = 0;
    std::string ids;
    words >> calls >> ids;
    reply << "{\"seconds\": [";
    const char* separator = "";
    for (double seconds : op.run(tokens, calls, ids)) {
      reply << separator << seconds;
      separator = ", ";
    }
    reply << "]}";
  } else if (what == "check") {
    std::string x, ids, w, out;
    words >> x >> ids >> w >> out;
    op.check(tokens, x, ids, w, out);
    reply << "{\"done\": true}";
  } else {
    throw std::runtime_error("unknown request: " + what);
  }
  return reply.str();
}

}  // namespace

int main(int count, char** words) try {
  if (count != 11) throw std::runtime_error("ten arguments are needed, see the head of the source");
  auto number = [&](int i) { return std::stoll(words[i]); };
  const Shape shape{
      ggml_type(number(2)), number(3), number(4), number(5), number(6), number(7), number(8)};
  Operator op(words[1], shape, int(number(9)), number(10) != 0);
  std::cout << "{\"how\": \"" << op.buffer_name() << "\"}" << std::endl;
  for (std::string line; std::getline(std::cin, line);) std::cout << answer(op, line) << std::endl;
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
