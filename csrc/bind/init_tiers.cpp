// Bindings of the expert cache, and of the model of a disk that tests put under it.
#include <utility>

#include "bind/tensors.h"
#include "tiers/expert_cache.h"
#include "tiers/model_reader.h"

namespace moestro {
namespace {

// A cache and the Python buffer that its slots are in.
struct BoundCache final : ExpertCache {
  BoundCache(std::shared_ptr<BlobReader> reader, BlobFile blobs, Bytes1 memory, int64_t slots,
             int64_t experts, const std::string& policy, int queue_depth)
      : ExpertCache(std::move(reader), blobs, reinterpret_cast<std::byte*>(memory.data()), slots,
                    experts, policy, queue_depth),
        memory(std::move(memory)) {}
  ~BoundCache() { end(); }  // before the buffer goes
  Bytes1 memory;
};

std::shared_ptr<ExpertCache> make_cache(std::shared_ptr<BlobReader> reader, int file,
                                        int64_t offset, int64_t blob_nbytes, Bytes1 memory,
                                        int64_t experts, const std::string& policy,
                                        int queue_depth) {
  require(blob_nbytes > 0 && int64_t(memory.shape(0)) % blob_nbytes == 0,
          "ExpertCache: the memory must be whole blobs");
  return std::make_shared<BoundCache>(std::move(reader), BlobFile{file, offset, blob_nbytes},
                                      memory, int64_t(memory.shape(0)) / blob_nbytes, experts,
                                      policy, queue_depth);
}

nb::dict counts_dict(const CacheCounts& counts) {
  nb::dict shadow;
  for (size_t p = 0; p < policies().size(); ++p)
    shadow[policies()[p].name] = counts.shadow_misses[p];
  nb::dict d;
  d["hits"] = counts.hits;
  d["misses"] = counts.misses;
  d["nbytes"] = counts.bytes;
  d["shadow_misses"] = shadow;
  return d;
}

nb::dict stats_dict(const ExpertCache& cache) {
  const CacheStats stats = cache.stats();
  nb::dict d;
  d["prefill"] = counts_dict(stats.prefill);
  d["decode"] = counts_dict(stats.decode);
  d["policy"] = stats.policy;
  d["resident"] = stats.resident;
  d["selections"] = stats.selections;
  return d;
}

}  // namespace

void init_tiers(nb::module_& m) {
  nb::class_<BlobReader>(m, "BlobReader", "Reads expert blobs into the slots of caches.");
  nb::class_<ModelReader, BlobReader>(
      m, "ModelReader", "A model of a disk, for tests: bytes come late, in any order.")
      .def(
          "__init__",
          [](ModelReader* self, const std::vector<Bytes1>& files, uint32_t seed) {
            std::vector<std::span<const std::byte>> spans;
            for (const Bytes1& file : files)
              spans.emplace_back(reinterpret_cast<const std::byte*>(file.data()), file.shape(0));
            new (self) ModelReader(std::move(spans), seed);
          },
          nb::arg("files"), nb::arg("seed"), nb::keep_alive<1, 2>())
      .def("fail_after", &ModelReader::fail_after, nb::arg("reads"))
      .def("reads", &ModelReader::reads);
  nb::class_<ExpertCache>(m, "ExpertCache", "The experts of a layer that are in memory.")
      .def_static("make", &make_cache, nb::arg("reader"), nb::arg("file"), nb::arg("offset"),
                  nb::arg("blob_nbytes"), nb::arg("memory").noconvert(), nb::arg("experts"),
                  nb::kw_only(), nb::arg("policy") = "auto", nb::arg("queue_depth") = 8)
      .def_prop_ro("experts", &ExpertCache::experts)
      .def_prop_ro("slots", &ExpertCache::slots)
      .def("set_prior", [](ExpertCache& cache,
                           const std::vector<double>& selections) { cache.set_prior(selections); })
      .def("stats", &stats_dict);
  m.def(
      "cache_policies",
      [] {
        std::vector<std::string> names;
        for (const Policy& policy : policies()) names.emplace_back(policy.name);
        return names;
      },
      "Names of the policies that say which expert leaves a full cache.");
}

}  // namespace moestro
