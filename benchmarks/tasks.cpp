// The operator's task lists, what their AMX instructions are, and what its tasks cost. For replay.py and amx_model.py.
//
//   bench_tasks list SHAPE TOKENS uniform|zipf|even KERNEL THREADS   JSON: every region's tasks, phases with their counts
//   bench_tasks costs SHAPE KERNEL MOST_ROWS [REPEATS]          JSON lines: what a task takes, by kind and rows
//   bench_tasks check                                          lists against profile/work.hpp, counts against the
//                                                              emulator; fails where they differ
//
// The list is that of an operator with THREADS threads; counts and times are those of one thread, whose list is mostly
// shorter ("counted_tasks"): what it takes to make one is scaled by their lengths. SHAPE is one of
// bench_step's. KERNEL amx_bf16_counted has the lists and the vector work of amx_bf16 and counts its tile
// instructions. The lists need no weights: all experts share one's memory.
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "../examples/command_line.hpp"
#include "tasks/check.hpp"
#include "tasks/costs.hpp"

namespace {

using namespace bench;  // NOLINT(google-build-using-namespace)

void print_integer(const char* key, std::int64_t value, const char* end = ", ") {
  std::printf("\"%s\": %lld%s", key, static_cast<long long>(value), end);
}

void print_counts(const TileCounts& c) {
  print_integer("tdpbf16ps", c.tdpbf16ps);
  print_integer("tileloadd", c.tileloadd);
  print_integer("tilestored", c.tilestored);
  print_integer("tilezero", c.tilezero);
  print_integer("ldtilecfg", c.ldtilecfg);
  print_integer("blocks", c.blocks);
  std::printf("\"steps\": [");
  for (std::size_t n = 0; n < c.steps.size(); ++n) {
    std::printf("%s%lld", n == 0 ? "" : ", ", static_cast<long long>(c.steps[n]));
  }
  std::printf("], ");
}

// Phases in which the region did something, with their work and their time on the calling thread.
void print_phases(const StepRun& step, std::size_t region) {
  const bool forward = region < 4;
  const amx_sft_moe::StepRecord& record = forward ? step.forward : step.backward;
  std::printf("\"phases\": [");
  const char* comma = "";
  for (const auto& [phase, done] : step.regions[region].phases) {
    std::printf("%s{\"name\": \"%s\", ", comma, amx_sft_moe::info_of(phase).name.data());
    print_counts(done.counts);
    print_integer("flop_of_step", record.work.flop_of(phase));
    print_integer("bytes_of_step", record.work.bytes_of(phase));
    print_integer("ns", done.cpu_ns, "}");
    comma = ", ";
  }
  std::printf("], ");
}

void print_tasks(const ListedRegion& region) {
  std::printf("\"tasks\": [");
  const char* comma = "";
  for (const ListedTask& t : region.tasks) {
    std::printf("%s[%d,%d,%lld,%lld,%lld,%lld,%lld,%lld]", comma, t.kind, t.group,
                static_cast<long long>(t.expert), static_cast<long long>(t.expert_rows),
                static_cast<long long>(t.row), static_cast<long long>(t.rows), static_cast<long long>(t.col),
                static_cast<long long>(t.cols));
    comma = ",";
  }
  std::printf("]");
}

// What the calling thread does while the others wait: sorting the routes of a pass, and before each region.
struct SerialTimes {
  std::array<std::int64_t, 2> route{};
  std::array<std::int64_t, kRegionNames.size()> region{};
};

// The least of some steps, wall time.
SerialTimes serial_times(ObservedLayer& observed, const amx_sft_moe::Gradients& grads) {
  constexpr int kSteps = 2;
  SerialTimes least;
  least.route.fill(std::int64_t{1} << 62);
  least.region.fill(std::int64_t{1} << 62);
  for (int i = 0; i < kSteps; ++i) {
    const StepRun step = observed.run_alone(grads);
    std::size_t pass = 0, region = 0;
    for (const amx_sft_moe::StepRecord* record : {&step.forward, &step.backward}) {
      for (const amx_sft_moe::RegionRecord& found : record->regions()) {
        std::int64_t& slot = found.parallel ? least.region[region++] : least.route[pass];
        slot = std::min(slot, (found.parallel ? found.threads[0].begin_ns : found.end_ns) - found.begin_ns);
      }
      ++pass;
    }
  }
  return least;
}

Spread spread_named(std::string_view name) {
  if (name == "uniform") return Spread::kUniform;
  if (name == "zipf") return Spread::kZipf;
  if (name == "even") return Spread::kEven;
  throw std::invalid_argument("spread: expected uniform, zipf or even, got " + std::string(name));
}

void print_list(const LayerShape& shape, index_t tokens, std::string_view spread, const char* kernel,
                int threads) {
  const Spread kind = spread_named(spread);
  const Layer layer(shape, tokens, {.spread = kind, .one_weight = true});
  ObservedLayer observed(layer, kernel, 1);
  observed.run();  // warms up
  const StepRun step = observed.run();
  const SerialTimes serial = serial_times(observed, layer.gradients());
  const StepRun listed = ObservedLayer(layer, kernel, threads).run();
  std::printf("{\"kernel\": \"%s\", \"shape\": \"%s\", \"spread\": \"%.*s\", ", observed.kernel_name().data(),
              shape.name, static_cast<int>(spread.size()), spread.data());
  print_integer("experts", shape.experts);
  print_integer("active_experts", layer.active);
  print_integer("top_k", shape.top_k);
  print_integer("hidden", shape.hidden);
  print_integer("intermediate", shape.intermediate);
  print_integer("rank", kRank);
  print_integer("tokens", tokens);
  print_integer("threads", threads);
  std::printf("\"route_ns\": [%lld, %lld], \"regions\": [", static_cast<long long>(serial.route[0]),
              static_cast<long long>(serial.route[1]));
  for (std::size_t r = 0; r < step.regions.size(); ++r) {
    const std::string_view name = step.regions[r].name;
    std::printf("%s\n{\"name\": \"%.*s\", ", r == 0 ? "" : ",", static_cast<int>(name.size()), name.data());
    const auto counted = static_cast<std::int64_t>(step.regions[r].tasks.size());
    const auto tasks = static_cast<std::int64_t>(listed.regions[r].tasks.size());
    print_integer("serial_ns", counted == 0 ? serial.region[r] : serial.region[r] * tasks / counted);
    print_integer("counted_tasks", counted);
    print_phases(step, r);
    print_tasks(listed.regions[r]);
    std::printf("}");
  }
  std::printf("]}\n");
}

int usage() {
  std::fprintf(stderr,
               "bench_tasks list SHAPE TOKENS uniform|zipf|even KERNEL THREADS | costs SHAPE KERNEL MOST_ROWS "
               "[REPEATS] | check\nshapes:");
  for (const LayerShape& shape : kShapes) std::fprintf(stderr, " %s", shape.name);
  std::fprintf(stderr, "\n");
  return 2;
}

int run(int argc, char** argv) {
  using command_line::number;
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "check") return check_all() == 0 ? 0 : 1;
  const LayerShape* shape = argc > 2 ? shape_named(argv[2]) : nullptr;
  if (shape == nullptr) return usage();
  if (mode == "list" && argc == 7) {
    print_list(*shape, number<index_t>("tokens", argv[3], 1), argv[4], argv[5], number("threads", argv[6], 1));
    return 0;
  }
  if (mode == "costs" && (argc == 5 || argc == 6)) {
    const int repeats = argc == 6 ? number("repeats", argv[5], 1) : 5;
    print_costs(*shape, argv[3], number<index_t>("most rows", argv[4], 1), repeats);
    return 0;
  }
  return usage();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_tasks: %s\n", error.what());
    return 2;
  }
}
