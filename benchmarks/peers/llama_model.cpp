// llama.cpp on a whole model, kept loaded so that it can take turns with another engine. Issues
// what llama.cpp's own llama-bench issues: random tokens, a batch of 2048 in steps of 512, flash
// attention, a polling thread pool; logits of the last token of a prompt and of every decoded
// token.
//
//   llama_model MODEL THREADS CONTEXT
//   llama_model quantize SOURCE TARGET FTYPE THREADS     FTYPE: number of llama.h's llama_ftype
//
// Each line on standard input is answered by a line of JSON:
//   prefill TOKENS            -> seconds of the whole prompt
//   decode CONTEXT TOKENS     -> seconds of all tokens; the context is computed once and kept
//   check ID ID ...           -> logits after these tokens
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "llama.h"

namespace {

constexpr int kBatch = 2048;

class Session {
 public:
  Session(const char* path, int threads, int context) {
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_ = llama_model_load_from_file(path, model_params);
    if (!model_) throw std::runtime_error(std::string("cannot load ") + path);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = uint32_t(context);
    params.n_batch = kBatch;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.n_threads = params.n_threads_batch = threads;
    context_ = llama_init_from_model(model_, params);
    if (!context_) throw std::runtime_error("cannot make a context");
    ggml_threadpool_params pool = ggml_threadpool_params_default(threads);
    llama_attach_threadpool(context_, ggml_threadpool_new(&pool), nullptr);
    tokens_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
  }

  double prefill(int count) {
    clear();
    return timed([&] { decode_tokens(count); });
  }

  std::vector<float> check(std::vector<llama_token> ids) {
    clear();
    issue(ids.data(), int(ids.size()));
    const float* logits = llama_get_logits_ith(context_, -1);
    return {logits, logits + tokens_};
  }

  double decode(int depth, int count) {
    if (depth != depth_) {
      clear();
      if (depth > 0) decode_tokens(depth);
      depth_ = depth;
    }
    const double seconds = timed([&] {
      for (int i = 0; i < count; ++i) decode_tokens(1);
    });
    llama_memory_seq_rm(llama_get_memory(context_), 0, depth, -1);
    return seconds;
  }

 private:
  template <typename Work>
  double timed(Work work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    return took.count();
  }

  void clear() {
    llama_memory_clear(llama_get_memory(context_), false);
    depth_ = 0;
  }

  void decode_tokens(int count) {
    std::vector<llama_token> ids(kBatch);
    for (int done = 0; done < count; done += kBatch) {
      const int n = std::min(kBatch, count - done);
      for (int i = 0; i < n; ++i) ids[size_t(i)] = std::rand() % tokens_;
      issue(ids.data(), n);
    }
    llama_synchronize(context_);
  }

  void issue(llama_token* ids, int count) {
    if (llama_decode(context_, llama_batch_get_one(ids, count)))
      throw std::runtime_error("llama_decode failed");
  }

  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
  int tokens_ = 0;
  int depth_ = 0;
};

int quantize(char** words) {
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = llama_ftype(std::stoi(words[4]));
  params.nthread = std::stoi(words[5]);
  return int(llama_model_quantize(words[2], words[3], &params));
}

std::string answer(Session& session, const std::string& line) {
  std::istringstream words(line);
  std::string what;
  words >> what;
  std::vector<int> numbers;
  for (int number; words >> number;) numbers.push_back(number);
  std::ostringstream reply;
  reply.precision(9);
  if (what == "prefill" && numbers.size() == 1) {
    reply << "{\"seconds\": " << session.prefill(numbers[0]) << "}";
  } else if (what == "decode" && numbers.size() == 2) {
    reply << "{\"seconds\": " << session.decode(numbers[0], numbers[1]) << "}";
  } else if (what == "check" && !numbers.empty()) {
    const char* separator = "{\"logits\": [";
    for (float logit : session.check(numbers)) {
      reply << separator << logit;
      separator = ", ";
    }
    reply << "]}";
  } else {
    throw std::runtime_error("unknown request: " + line);
  }
  return reply.str();
}

}  // namespace

int main(int count, char** words) try {
  llama_backend_init();
  if (count == 6 && std::string(words[1]) == "quantize") return quantize(words);
  if (count != 4) throw std::runtime_error("see the head of the source for the arguments");
  Session session(words[1], std::stoi(words[2]), std::stoi(words[3]));
  std::cout << "{\"ready\": true}" << std::endl;
  for (std::string line; std::getline(std::cin, line);)
    std::cout << answer(session, line) << std::endl;
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
