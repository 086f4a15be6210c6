#include <stdexcept>

#include "communicator.h"

namespace parallel_ops::nccl {
namespace {

template <class T>
struct Setting {
  const char* name;
  int since;
  T RawConfig::* field;
};

constexpr Setting<int> kNumbers[] = {
    {"cga_cluster_size", version(2, 17), &RawConfig::cga_cluster_size},
    {"min_ctas", version(2, 17), &RawConfig::min_ctas},
    {"max_ctas", version(2, 17), &RawConfig::max_ctas},
    {"traffic_class", version(2, 25), &RawConfig::traffic_class},
    {"collnet_enable", version(2, 27), &RawConfig::collnet_enable},
    {"cta_policy", version(2, 27), &RawConfig::cta_policy},
    {"nvls_ctas", version(2, 27), &RawConfig::nvls_ctas},
    {"channels_per_net_peer", version(2, 28), &RawConfig::channels_per_net_peer},
    {"nvlink_centric_sched", version(2, 28), &RawConfig::nvlink_centric_sched},
};

constexpr Setting<const char*> kTexts[] = {
    {"net_name", version(2, 17), &RawConfig::net_name},
    {"comm_name", version(2, 27), &RawConfig::comm_name},
};

template <class T, size_t n>
const Setting<T>& find(const Setting<T> (&settings)[n], const std::string& name) {
  for (const Setting<T>& setting : settings) {
    if (name == setting.name) return setting;
  }
  throw std::invalid_argument("config: no setting of this type is called " + name);
}

}  // namespace

void Config::set(const std::string& name, int value) {
  find(kNumbers, name);
  numbers_.emplace_back(name, value);
}

void Config::set(const std::string& name, const std::string& value) {
  find(kTexts, name);
  texts_.emplace_back(name, value);
}

RawConfig Config::raw(const Library& library) const {
  RawConfig raw;
  raw.blocking = 0;
  for (const auto& [name, value] : numbers_) {
    const Setting<int>& setting = find(kNumbers, name);
    // The policy without multiprocessors came one release after the setting.
    const bool zero_policy = name == "cta_policy" && (value & kCtaPolicyZero) != 0;
    library.require("config." + name + (zero_policy ? " = zero" : ""), zero_policy ? version(2, 28) : setting.since);
    raw.*setting.field = value;
  }
  for (const auto& [name, value] : texts_) {
    const Setting<const char*>& setting = find(kTexts, name);
    library.require("config." + name, setting.since);
    raw.*setting.field = value.c_str();
  }
  return raw;
}

}  // namespace parallel_ops::nccl
