#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace shapes {

class Shape {
 public:
  virtual ~Shape() = default;
  virtual double area() const = 0;

 protected:
  std::string name_;
};

class Circle final : public Shape {
 public:
  explicit Circle(double radius) : radius_(radius) { name_ = "circle"; }

  double area() const override {
    return M_PI * radius_ * radius_;
  }

 private:
  double radius_ = 0;
};

template <typename T, typename... Args>
std::unique_ptr<Shape> make(Args&&... args) {
  return std::make_unique<T>(std::forward<Args>(args)...);
}

// The largest of `shapes`, nullptr (none) for an empty list.
const Shape* largest(const std::vector<std::unique_ptr<Shape>>& shapes) {
  const Shape* found = nullptr;
  for (const auto& shape : shapes) {
    if (!found || shape->area() > found->area()) {
      found = shape.get();
    }
  }
  return found;
}

double total(const std::vector<std::unique_ptr<Shape>>& shapes) {
  double sum = 0;
  auto add = [&sum](const Shape& shape) {
    sum += shape.area();
  };
  for (const auto& shape : shapes) add(*shape);
  return sum;
}

}  // namespace shapes

int main() {
  std::vector<std::unique_ptr<shapes::Shape>> all;
  all.push_back(shapes::make<shapes::Circle>(2.0));
  try {
    return shapes::largest(all) == nullptr ? 1 : 0;
  } catch (const std::exception& error) {
    return 2;
  }
}
