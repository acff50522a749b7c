// Tests of the native core without Python, for sanitizers: `make sanitize`.
#include <cstdio>
#include <exception>

#include "check.h"

int main() {
  struct Test {
    const char* name;
    void (*run)();
  };
  const Test tests[] = {{"tile model", moestro_test::test_tile_model},
                        {"team", moestro_test::test_team},
                        {"reader", moestro_test::test_reader},
                        {"streams", moestro_test::test_streams},
                        {"streamed experts", moestro_test::test_streamed_moe},
                        {"ops", moestro_test::test_ops}};
  int failed = 0;
  for (const Test& test : tests) {
    try {
      test.run();
      std::printf("passed: %s\n", test.name);
    } catch (const std::exception& error) {
      std::printf("FAILED: %s: %s\n", test.name, error.what());
      ++failed;
    }
  }
  return failed == 0 ? 0 : 1;
}
