// Which kernel table runs.
#pragma once

#include <string>
#include <vector>

#include "isa/table.h"

namespace moestro {

// The active table: the best the machine supports unless set_isa() chose another.
const IsaTable& isa();
// Throws Error(kUnsupportedOp) if the name is unknown or the machine lacks the instructions.
const IsaTable& isa_named(const std::string& name);
void set_isa(const std::string& name);
// Whether integer formats give the same bits on every instruction set and for any number of tokens
// (the default). Off, tables that gain from it multiply many tokens in another rounding. Read when
// an op is made.
bool same_bits();
void set_same_bits(bool same);
// Names of all tables that this machine can run, plainest first.
std::vector<std::string> supported_isas();
// Names of the models of instruction sets: for tests, on any machine, chosen by set_isa() alone.
std::vector<std::string> emulated_isas();
// Names of all tables in this build but those models.
std::vector<std::string> built_isas();

}  // namespace moestro
