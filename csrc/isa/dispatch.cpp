#include "isa/dispatch.h"

#include <atomic>

#include "core/error.h"
#include "isa/detect.h"

namespace moestro {
namespace {

struct Entry {
  const IsaTable* table;
  bool (*supported)();
};

const Entry kEntries[] = {
#define MOESTRO_ISA(isa) {&k_##isa, cpu_supports_##isa},
#include "isa/isa.def"
#undef MOESTRO_ISA
};

const IsaTable* const kEmulated[] = {
#define MOESTRO_ISA(isa)
#define MOESTRO_EMULATED_ISA(isa) &k_##isa,
#include "isa/isa.def"
#undef MOESTRO_EMULATED_ISA
#undef MOESTRO_ISA
};

const IsaTable* best() {
  const IsaTable* table = nullptr;
  for (const Entry& entry : kEntries)
    if (entry.supported()) table = entry.table;
  return table;
}

std::atomic<const IsaTable*> active{nullptr};
std::atomic<bool> same{true};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

const IsaTable& isa() {
  const IsaTable* table = active.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = best();
    active.store(table, std::memory_order_release);
  }
  return *table;
}

const IsaTable& isa_named(const std::string& name) {
  for (const IsaTable* table : kEmulated)
    if (name == table->name) return *table;
  for (const Entry& entry : kEntries) {
    if (name != entry.table->name) continue;
    if (!entry.supported())
      throw Error(ErrorKind::kUnsupportedOp,
                  "instruction set " + name +
                      " was asked for, but this machine supports: " + join(supported_isas()));
    return *entry.table;
  }
  throw Error(ErrorKind::kUnsupportedOp,
              "unknown instruction set " + name + "; this build has: " + join(built_isas()));
}

void set_isa(const std::string& name) { active.store(&isa_named(name), std::memory_order_release); }

bool same_bits() { return same.load(std::memory_order_relaxed); }
void set_same_bits(bool value) { same.store(value, std::memory_order_relaxed); }

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries)
    if (entry.supported()) names.emplace_back(entry.table->name);
  return names;
}

std::vector<std::string> emulated_isas() {
  std::vector<std::string> names;
  for (const IsaTable* table : kEmulated) names.emplace_back(table->name);
  return names;
}

std::vector<std::string> built_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) names.emplace_back(entry.table->name);
  return names;
}

}  // namespace moestro
