import Foundation

/// What can be sent (and received).
protocol Syncable {
  var id: UUID { get }
  func encoded() throws -> Data
}

enum SyncError: Error {
  case offline
  case rejected(status: Int)
}

final class Sync {
  private var waiting: [UUID: Syncable] = [:]
  private let session: URLSession

  init(session: URLSession = .shared) {
    self.session = session
  }

  func add(_ item: Syncable) {
    guard waiting[item.id] == nil else {
      return
    }
    waiting[item.id] = item
  }

  @discardableResult
  func flush(to url: URL) async throws -> Int {
    var sent = 0
    for (id, item) in waiting {
      var request = URLRequest(url: url)
      request.httpMethod = "PUT"
      request.httpBody = try item.encoded()
      let (_, response) = try await session.data(for: request)
      switch (response as? HTTPURLResponse)?.statusCode {
      case 200, 204:
        waiting[id] = nil
        sent += 1
      case let status?:
        throw SyncError.rejected(status: status)
      default:
        throw SyncError.offline
      }
    }
    return sent
  }

  var names: [String] {
    waiting.keys.map { id in
      "\(id) (waiting)"
    }.sorted()
  }
}
