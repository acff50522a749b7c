// Which of several drives to read a piece from, by what each has in flight and how fast it was.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace moestro {

class Drives {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Drive {
    int64_t in_flight = 0;  // bytes
    int64_t bytes = 0;      // read
    double seconds = 0;     // with reads in flight
    double rate = 0;        // bytes per second of late, older ones fading; 0: unknown
  };

  explicit Drives(int count) : drives_(size_t(count)) {}

  // The drive that would have read these bytes first, of those that `usable` (bit per drive, not 0)
  // allows. Now and then one that is passed over for long, so that its speed stays known.
  int choose(uint64_t usable, int64_t bytes);
  void begin(int drive, int64_t bytes, Time now);
  // `bytes` as begun, of which `got` came.
  void end(int drive, int64_t bytes, int64_t got, Time now);

  const Drive& operator[](int drive) const { return drives_[size_t(drive)].drive; }

 private:
  struct Tracked {
    Drive drive;
    Time since{};              // of the last change while reads were in flight
    int64_t window_bytes = 0;  // of the measurement that is being made
    double window_seconds = 0;
    double recent_bytes = 0, recent_seconds = 0;  // of earlier ones, fading
    int64_t passed_over = 0;
  };
  void pass_time(Tracked& drive, Time now);

  std::vector<Tracked> drives_;
};

}  // namespace moestro
